"""Reads the sizes in an out-of-memory error and picks the best fix for them.

It understands PyTorch's wording in every version since 0.4 (CUDACachingAllocator.cpp), including
ROCm and Apple GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from miner_guard.config import read_toml
from miner_guard.incidents.knowledge import Fix

_UNITS = {"b": 1, "bytes": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = r"(\d+(?:\.\d+)?) ?(bytes|[kmgt]i?b|b)\b"
_OTHERS = rf"process \d+ has {_SIZE} memory in use"
_GPU = r"(?:gpu|xpu|device)[ :](\d+)"

_NOTABLE_RATIO = 0.1
"""Smaller shares of the GPU's memory are ignored."""

_ROUNDED = 0.98
"""Tolerance: the message rounds sizes that the allocator reads one after another."""

_ONE_TENSOR_RATIO = 0.25
"""A single request for more than this share of the GPU's memory points to one oversized
tensor."""


@dataclass(frozen=True)
class Oom:
    """The sizes in one error, in bytes; None if the message does not contain them."""

    gpu: int | None
    tried: int | None
    total: int | None
    free: int | None
    in_use: int | None
    allocated: int | None
    reserved: int | None
    unallocated: int | None
    allowed: int | None
    others: int | None
    """Bytes that other processes are using."""

    @property
    def kind(self) -> str:
        """`fragmentation`, `others`, `one_tensor`, `capped` or `full`; `unknown` without sizes."""
        if self.tried is None or self.total is None:
            return "unknown"
        if self.unallocated is not None and self.unallocated >= max(
            self.tried, _NOTABLE_RATIO * self.total
        ):
            return "fragmentation"
        if self.others is not None and self.others > _NOTABLE_RATIO * self.total:
            return "others"
        if self.allowed is not None and self.free is not None and self.free > self.tried:
            return "capped"
        return "one_tensor" if self.tried > _ONE_TENSOR_RATIO * self.total else "full"


@dataclass(frozen=True)
class Training:
    """Settings of the run that a fix can mention; None if unknown."""

    batch_size: int | None = None
    effective_batch_size: int | None = None
    world_size: int | None = None


@lru_cache(maxsize=1)
def _told() -> Mapping[str, Any]:
    return read_toml(Path(__file__).with_name("oom.toml"))


def parse(text: str) -> Oom:
    """Read the sizes in a message from any version of PyTorch."""
    low = text.lower()
    values = {name: _first(patterns, low) for name, patterns in _told()["sizes"].items()}
    reserved, allocated = values["reserved"], values["allocated"]
    if values["unallocated"] is None and reserved is not None and allocated is not None:
        values["unallocated"] = max(0, reserved - allocated)
    if values["in_use"] is not None and values["in_use"] < (allocated or 0) * _ROUNDED:
        # In a container that hides the processes, the driver says 0 bytes.
        values["in_use"] = None
    gpu = re.search(_GPU, low)
    listed = [_size(*match) for match in re.findall(_OTHERS, low)]
    total, free, in_use = values["total"] or 0, values["free"], values["in_use"]
    others = sum(listed) if listed else None
    if listed and in_use is None:
        used = total - (free or 0)
        others = _without_failed(listed, (allocated or 0) + (values["unallocated"] or 0), used)
    elif others is None and total and free is not None and in_use is not None:
        others = max(0, total - free - in_use)
    return Oom(gpu=int(gpu[1]) if gpu else None, others=others, **values)


def _without_failed(listed: list[int], torch_bytes: int, used: int) -> int:
    """Total bytes of the `listed` processes, except the one that failed.

    In a container, the failed process does not know its pid on the host and lists itself as another
    process. That is the case if the listed bytes plus PyTorch's (`torch_bytes`) exceed the GPU's
    `used` bytes. The failed process is then the smallest one listed with at least `torch_bytes`.
    """
    possible = [size for size in listed if size >= torch_bytes * _ROUNDED]
    among = bool(torch_bytes and used and possible) and sum(listed) + torch_bytes * _ROUNDED > used
    return sum(listed) - min(possible) if among else sum(listed)


def describe(oom: Oom) -> str:
    """The known sizes in words, and what they mean; empty if they are unknown."""
    sizes = {words: getattr(oom, name) for name, words in _told()["words"].items()}
    parts = [f"{words} {gib(size)}" for words, size in sizes.items() if size is not None]
    shown = "" if oom.tried is None else f"It {', '.join(parts)}."
    return f"{shown} {_told()['meaning'].get(oom.kind, '')}".strip()


def fixes(oom: Oom, usual: list[Fix], training: Training) -> list[Fix]:
    """The usual fixes, with the run's settings filled in. If the sizes suggest a specific fix, it
    comes first."""
    smaller = _smaller_batch(training)
    ordered = [Fix(smaller, usual[0].source) if smaller else usual[0], *usual[1:]]
    first = _told()["fix"].get(oom.kind)
    if first is None:
        return ordered
    first = first.format(
        unallocated=gib(oom.unallocated),
        others=gib(oom.others),
        tried=gib(oom.tried),
        gpu="the GPU" if oom.gpu is None else f"GPU {oom.gpu}",
    )
    rest = [fix for fix in ordered if not (oom.kind == "others" and "nvidia-smi" in fix.do)]
    return [Fix(first, _told()["source"]), *rest]


def _smaller_batch(training: Training) -> str | None:
    batch, effective = training.batch_size, training.effective_batch_size
    if batch is None:
        return None
    if batch == 1:
        return (
            "The micro-batch is already 1: enable gradient checkpointing or shorten the sequence."
        )
    smaller = batch // 2
    if effective is None:
        return f"Lower the micro-batch from {batch} to {smaller} and double gradient accumulation."
    ranks = training.world_size or 1
    before, after = effective // (batch * ranks), effective // (smaller * ranks)
    return (
        f"Lower the micro-batch from {batch} to {smaller} and raise gradient accumulation from "
        f"{before} to {after}, which keeps the effective batch at {effective}."
    )


def gib(value: int | None) -> str:
    """`3.15 GiB`, `512 MiB`."""
    if value is None:
        return "unknown"
    return f"{value / (1 << 30):.2f} GiB" if value >= 1 << 30 else f"{value / (1 << 20):.0f} MiB"


def _first(patterns: list[str], text: str) -> int | None:
    for pattern in patterns:
        if match := re.search(pattern.replace("SIZE", _SIZE), text):
            return _size(match[1], match[2])
    return None


def _size(number: str, unit: str) -> int:
    return int(float(number) * _UNITS["bytes" if unit == "bytes" else unit[0]])
