"""The demo's model, its data, and the outer optimizer of DiLoCo."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SHAPE = {"layers": 2, "width": 128, "heads": 4, "context": 128}
"""Dimensions of the model: half a million parameters."""

CONTEXT = SHAPE["context"]

_DATA_BYTES = 8 * 1024 * 1024
"""Enough to train on, and read in a tenth of a second."""


class ByteGPT(nn.Module):
    """Predicts the next byte: every byte is a token, so there is no tokenizer to download."""

    def __init__(self) -> None:
        super().__init__()
        width, heads = SHAPE["width"], SHAPE["heads"]
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                heads,
                4 * width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
                bias=False,
            )
            for _ in range(SHAPE["layers"])
        )
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            # GPT-2's initialisation.
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats per byte for int64 `tokens` and `targets` of shape (batch,
        length); without targets the logits, (batch, length, 256). length <= `CONTEXT`."""
        length, device = tokens.shape[1], tokens.device
        x = self.token(tokens) + self.position(torch.arange(length, device=device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device, x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits = functional.linear(self.norm(x), self.token.weight)
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Corpus:
    """Windows of the standard library's source code, which ships with every Python; deterministic
    in (seed, rank, step), so that a resumed run sees the same data."""

    def __init__(self, seed: int, rank: int, *, held_out: bool = False) -> None:
        """`held_out`: the last 5 % of the data instead of the rest. Raises FileNotFoundError."""
        data = _standard_library()
        cut = len(data) - len(data) // 20
        self._data = torch.frombuffer(
            bytearray(data[cut:] if held_out else data[:cut]), dtype=torch.uint8
        )
        self._seed, self._rank = seed, rank

    def batch(self, step: int, micro: int, size: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, each (size, CONTEXT) int64 on the CPU."""
        seed = hash((self._seed, self._rank, step, micro)) & 0x7FFF_FFFF_FFFF
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self._data) - CONTEXT - 1, (size, 1), generator=generator)
        window = self._data[starts + torch.arange(CONTEXT + 1)].long()
        return window[:, :-1], window[:, 1:]


def _standard_library() -> bytes:
    root = Path(sysconfig.get_paths()["stdlib"])
    data = bytearray()
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if "site-packages" not in path.parts and len(data) < _DATA_BYTES:
            data += path.read_bytes() + b"\n"
    if not data:
        raise FileNotFoundError(
            f"no .py files in {root}: this Python installation lacks its standard library's source "
            "files"
        )
    return bytes(data[:_DATA_BYTES])


class OuterOptimizer:
    """Outer steps as in DiLoCo (Douillard et al. 2023): SGD with Nesterov momentum on the sum of
    the inner steps. Works on the local shards, so a step needs no collective."""

    # DiLoCo's 0.7 suits many miners, whose averaged update is shorter than each miner's own. A
    # single miner would overshoot: the first step is (1 + momentum) * lr times the distance.
    LR, MOMENTUM = 0.5, 0.9

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.start = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.velocity = {name: torch.zeros_like(p) for name, p in self.start.items()}

    @torch.no_grad()
    def pseudo_gradient(self, name: str, parameter: Tensor) -> Tensor:
        """The pseudo-gradient, start − now, with the parameter's shape and sharding."""
        return self.start[name] - parameter.detach()

    @torch.no_grad()
    def step(self) -> None:
        """Move the outer parameters along the pseudo-gradient; reset the inner ones to them."""
        for name, parameter in self._model.named_parameters():
            gradient = self.pseudo_gradient(name, parameter)
            self.velocity[name].mul_(self.MOMENTUM).add_(gradient)
            self.start[name].sub_(self.LR * (gradient + self.MOMENTUM * self.velocity[name]))
            parameter.copy_(self.start[name])

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start, "velocity": self.velocity}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for kind, tensors in self.state_dict().items():
            for name, tensor in tensors.items():
                tensor.copy_(state[kind][name])
