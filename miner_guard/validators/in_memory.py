"""Checks gradients in the miner's memory, before the miner writes them, for faults that only the
values reveal.

Runs in rank 0's upload thread, after `validators.outline` found no problem in names, types and
shapes. `validators.decoding` works in blocks: it uses about 30 MB whatever the size and copies no
whole tensor, and torch releases the GIL while it works, so training continues. It never touches a
GPU.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from miner_guard.validators.document import RejectedFile, applied, gist
from miner_guard.validators.limits import Limits
from miner_guard.validators.shapes import Shapes

MAX_BYTES = 4 * 1024**3
"""Only the audit checks larger gradients, because reading them takes longer than 20 s. Subnet 38's
compressor keeps 32 of every 4,096 values: 0.2 GB for a model with 4 billion parameters."""

_READABLE = {"cpu", "meta"}


def contents(
    torch: Any, document: Mapping[str, Any], limits: Limits, shapes: Shapes | None
) -> dict[str, Any]:
    """The report of `validators.inspection.inspect_file`, without `size_bytes`, for a dictionary in
    memory.

    `reason` says why nothing was read: values on a GPU, or too many bytes.
    """
    tensors = list(_tensors(torch, document.values()))
    elsewhere = {tensor.device.type for tensor in tensors} - _READABLE
    if elsewhere:
        return _unread(f"the values are on {', '.join(sorted(elsewhere))}")
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if claimed > MAX_BYTES:
        return _unread(f"{claimed} bytes is over the limit for pre-upload checks ({MAX_BYTES})")
    numbers = {
        name: value
        for name, value in dataclasses.asdict(limits).items()
        if name.startswith("gradients_")
    }
    try:
        _check_loads(torch, document)
        return applied(torch, document, limits=numbers, shapes=shapes, size=MAX_BYTES)
    except RejectedFile as refusal:
        return {"problems": [str(refusal)], "params": 0, "shapes_known": shapes is not None}


def _tensors(torch: Any, values: Iterable[Any], depth: int = 3) -> Iterator[Any]:
    """Yield the tensors among the values, including those in nested containers: a quantisation
    table may be the only tensor on the GPU."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif depth and isinstance(value, (list, tuple)):
            yield from _tensors(torch, value, depth - 1)
        elif depth and isinstance(value, Mapping):
            yield from _tensors(torch, value.values(), depth - 1)


def _unread(reason: str) -> dict[str, Any]:
    return {"problems": [], "params": None, "reason": reason}


def _check_loads(torch: Any, document: Mapping[str, Any]) -> None:
    """Check that `torch.load(weights_only=True)` accepts everything except the plain tensors: save
    it, then load it as validators do. Raises RejectedFile."""
    rest = dict(_no_plain_tensors(torch, document))
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:
        # Any exception here means that validators cannot load the file either.
        raise RejectedFile(
            f"does not load with weights_only=True: {type(error).__name__}: {gist(str(error))}"
        ) from error


def _no_plain_tensors(torch: Any, document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if type(value) is not torch.Tensor:
            yield key, value
