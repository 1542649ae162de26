"""The training data: the standard library's source code, which ships with every Python."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

_LIMIT = 8 * 1024 * 1024
"""Bytes of source code to use: enough for the demo to train on, and read in a tenth of a second."""


class Corpus:
    """Windows of bytes, deterministic in (seed, rank, step): a resumed run sees the same data."""

    def __init__(self, data: bytes, seed: int, rank: int) -> None:
        if not data:
            raise ValueError("the training data is empty")
        self._data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._seed = seed
        self._rank = rank

    def batch(self, step: int, micro: int, size: int, context: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, each (size, context) int64 on the CPU."""
        generator = torch.Generator().manual_seed(
            hash((self._seed, self._rank, step, micro)) & 0x7FFF_FFFF_FFFF
        )
        starts = torch.randint(len(self._data) - context - 1, (size, 1), generator=generator)
        window = self._data[starts + torch.arange(context + 1)].long()
        return window[:, :-1], window[:, 1:]

    def noise(self, size: int, context: int) -> tuple[Tensor, Tensor]:
        """A batch of random bytes for the `spike` fault: it resembles a corrupt data shard."""
        window = torch.randint(256, (size, context + 1))
        return window[:, :-1], window[:, 1:]


def standard_library() -> bytes:
    """Up to 8 MiB of the standard library's modules, sorted by name. Raises FileNotFoundError."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    size = 0
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if "site-packages" in path.parts or size >= _LIMIT:
            continue
        parts.append(path.read_bytes())
        size += len(parts[-1])
    if not parts:
        raise FileNotFoundError(
            f"no .py files in {root}: this Python installation lacks its standard library's source "
            "files"
        )
    return b"\n".join(parts)[:_LIMIT]
