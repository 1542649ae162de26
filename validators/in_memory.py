"""Reads gradients in the miner's memory before it writes them: what only the values show.

Runs in rank 0's upload thread, after `validators.outline` found no problem in names, types and
shapes. `validators.decoding` works in blocks: about 30 MB whatever the size, no tensor is copied
whole, and torch releases the interpreter's lock meanwhile, so training continues. It never touches
a GPU.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from validators.document import RejectedFile, applied, gist
from validators.limits import Limits
from validators.shapes import Shapes

MAX_BYTES = 4 * 1024**3
"""Tensors of more bytes are left to the audit: reading them takes longer than 20 s. Subnet 38's
compressor keeps 32 of each 4,096 values: 0.2 GB of a model of 4 G parameters."""

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
        return _unread(f"{claimed} bytes are more than are read before an upload ({MAX_BYTES})")
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
    """Tensors among the values and in containers among them: a quantisation's table may be on the
    GPU alone."""
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
    """Whether `torch.load(weights_only=True)` accepts everything that is no plain tensor: write it
    and load it, as validators do. Raises RejectedFile."""
    rest = dict(_no_plain_tensors(torch, document))
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:
        # Any exception there means that validators cannot load the file either.
        raise RejectedFile(
            f"does not load with weights_only=True: {type(error).__name__}: {gist(str(error))}"
        ) from error


def _no_plain_tensors(torch: Any, document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if type(value) is not torch.Tensor:
            yield key, value
