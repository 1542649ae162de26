"""The layout of a state's tensors in the memory or file that holds this rank's share of the
state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_ALIGNMENT = 64


@dataclass(frozen=True)
class Leaf:
    """A tensor's type, shape, and position in the memory or file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Part:
    """One tensor in a state."""

    value: torch.Tensor
    """The tensor that the state contains."""

    local: torch.Tensor
    """This rank's shard of `value`, detached from its graph."""


def local_part(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, detached from its graph."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.detach()


def _walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _walk(each, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _walk(each, f"{path}/{index}")
    else:
        yield path, value


@torch.no_grad()
def parts(state: dict[str, Any]) -> tuple[dict[str, Part], dict[str, Any]]:
    """Split a state into its tensors and all other values, each by path."""
    tensors: dict[str, Part] = {}
    rest: dict[str, Any] = {}
    for path, value in _walk(state):
        if isinstance(value, torch.Tensor):
            tensors[path] = Part(value, local_part(value))
        else:
            rest[path] = value
    return tensors, rest


def placed(tensors: dict[str, Part], offset: int) -> list[Leaf]:
    """Lay out this rank's shards one after another, starting at `offset`."""
    leaves = []
    for name, part in tensors.items():
        local = part.local
        offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
        size = local.numel() * local.element_size()
        leaves.append(Leaf(name, str(local.dtype), tuple(local.shape), offset, size))
        offset += size
    return leaves


def tensor_over(data: Any, leaf: Leaf) -> torch.Tensor:
    """Return a tensor that shares the leaf's bytes in `data`."""
    dtype = getattr(torch, leaf.dtype.removeprefix("torch."))
    if not leaf.size:
        return torch.empty(leaf.shape, dtype=dtype)
    count = leaf.size // dtype.itemsize
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=leaf.offset)
    return flat.view(leaf.shape)


def fill(value: Any, rest: dict[str, Any], path: str = "") -> None:
    """Put the values of `rest`, none of which are tensors, back into `value`, in place."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in list(items):
        where = f"{path}/{key}"
        if isinstance(each, (dict, list)):
            fill(each, rest, where)
        elif where in rest:
            value[key] = rest[where]
