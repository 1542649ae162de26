"""Outer steps as in DiLoCo (Douillard et al. 2023): a slower optimizer uses the sum of the inner
steps as its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# DiLoCo's 0.7 suits many miners, whose averaged update is shorter than each miner's own. A single
# miner would overshoot: the first Nesterov step is (1 + momentum) * lr times the distance trained.
_LR = 0.5
_MOMENTUM = 0.9


class OuterOptimizer(torch.optim.Optimizer):
    """SGD with Nesterov momentum on pseudo-gradients. Works on the local shards, so a step needs no
    collective."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": _LR, "momentum": _MOMENTUM})
        self._model = model
        self.start = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.velocity = {name: torch.zeros_like(p) for name, p in self.start.items()}
        for name, parameter in model.named_parameters():
            self.state[parameter] = {"start": self.start[name], "velocity": self.velocity[name]}

    @torch.no_grad()
    def pseudo_gradient(self, name: str, parameter: Tensor) -> Tensor:
        """The pseudo-gradient, start − now, with the parameter's shape and sharding."""
        return self.start[name] - parameter.detach()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move the outer parameters along the pseudo-gradient and reset the inner ones to the
        result."""
        for name, parameter in self._model.named_parameters():
            gradient = self.pseudo_gradient(name, parameter)
            self.velocity[name].mul_(_MOMENTUM).add_(gradient)
            self.start[name].sub_(_LR * (gradient + _MOMENTUM * self.velocity[name]))
            parameter.copy_(self.start[name])

    def state_dict(self) -> dict[str, Any]:
        """Tensors by name, for a checkpoint."""
        return {"start": self.start, "velocity": self.velocity}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the tensors of a checkpoint."""
        for kind, own in (("start", self.start), ("velocity", self.velocity)):
            for name, tensor in own.items():
                tensor.copy_(state[kind][name])
