"""Any training script, unmodified: steps by its optimizer, loss where backward starts, devices by what is optimized.

Hugging Face's Trainer and Lightning are followed through their callbacks; the optimizer is left alone then.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

from miner_guard.attach.adapter import Adapter
from miner_guard.attach.losses import Losses
from miner_guard.rank.compiled import uncompiled

_OTHERS_IN_A_ROW = 64
"""Steps of other optimizers after which the one that led is taken for gone."""


class Auto:
    """Follows one training process."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.losses = Losses()
        self.framework: str | None = None
        """Whose callbacks bring the steps; None: the optimizer does."""

        self.steps = 0
        self._leader: Callable[[], Any] = lambda: None
        self._others = 0
        self._diagnosed = False
        self._evaluated: float | None = None

    # a plain loop

    def follow_torch(self, module: Any) -> None:
        """`torch.optim.optimizer` was imported."""
        from torch import Tensor

        module.register_optimizer_step_pre_hook(uncompiled(self._stepping))
        module.register_optimizer_step_post_hook(uncompiled(self._stepped))
        backward: Any = Tensor.backward

        @uncompiled
        @functools.wraps(backward)
        def followed(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.adapter.quiet(self._backward, tensor)
            with self.adapter.phase("backward"):
                return backward(tensor, *args, **kwargs)

        setattr(Tensor, "backward", followed)  # noqa: B010 - mypy takes no assigned method

    def _backward(self, tensor: Any) -> None:
        # From here on, and not from the import on: launchers and dataloaders import torch too.
        self.begin()
        self.losses.note(tensor)

    def begin(self) -> None:
        """This process trains."""
        self.adapter.begin(agree=False)

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.adapter.phase("optimizer").__enter__()

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.adapter.phase("optimizer").__exit__(None, None, None)
        if self.framework is None and self._leads(optimizer):
            self.steps += 1
            self.step(self.steps, optimizer)

    def _leads(self, optimizer: Any) -> bool:
        """One of several optimizers counts the steps: the first, for as long as it steps."""
        leader = self._leader()
        if leader is None or self._others >= _OTHERS_IN_A_ROW:
            self._leader, leader = weakref.ref(optimizer), optimizer
        self._others = 0 if leader is optimizer else self._others + 1
        return leader is optimizer

    def step(self, number: int, optimizer: Any) -> None:
        """The end of a step, from the optimizer or from a framework's callback."""
        self.adapter.quiet(self._step, number, optimizer)

    def _step(self, number: int, optimizer: Any) -> None:
        self.begin()
        guard = self.adapter.guard
        assert guard is not None
        loss, micro_batches = self.losses.take()
        evaluated, self._evaluated = self._evaluated, None
        guard.step(inner_step=number, loss=loss, lr=optimizer.param_groups[0].get("lr"), eval_loss=evaluated)
        if not self._diagnosed:
            self._diagnosed = True
            guard.diagnose(
                optimized(optimizer), accumulation_steps=micro_batches or None, model_name=os.path.basename(sys.argv[0])
            )

    def evaluated(self, loss: float | None) -> None:
        """A framework has evaluated; it goes with the next step."""
        self._evaluated = loss

    def finished(self) -> None:
        """A framework says that its configured end is reached."""
        if self.adapter.guard is not None:
            self.adapter.guard.close(finished=True)
            self.adapter.guard = None


def optimized(optimizer: Any) -> Any:
    """What the optimizer trains, as one module: the very parameters, wherever FSDP or DDP have put them."""
    import torch

    module = torch.nn.Module()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        if isinstance(parameter, torch.nn.Parameter):
            module.register_parameter(f"p{number}", parameter)
    return module


_auto = Auto(Adapter("auto"))


def imported(name: str, module: Any) -> None:
    """Called by the sitecustomize after one of the watched modules was imported."""
    if name == "torch.optim.optimizer":
        _auto.follow_torch(module)
        return
    from miner_guard.attach import frameworks

    if name == "transformers.trainer":
        frameworks.follow_transformers(_auto, module)
    else:
        frameworks.follow_lightning(_auto, module)
