"""How subnet 38 and Templar split a parameter into chunks before keeping each chunk's largest
values.

A chunk's edge is the largest divisor of a dimension that does not exceed the target (DeMo's
transform, `_get_smaller_split` in utils/compression.py of dstrbtd/DistributedTraining).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence


@functools.cache
def chunk_edge(length: int, target: int) -> int:
    """The largest divisor of `length` up to `target`."""
    return next(edge for edge in range(min(target, length), 0, -1) if length % edge == 0)


def scattered_into(shape: Sequence[int], target: int | None, layout: str) -> tuple[int, ...] | None:
    """The shape that validators scatter a parameter's values into, along its last dimension.

    For a matrix of `y·h` rows and `x·w` columns: `(y, x, h·w)` in `blocks` (Templar; subnet 38 with
    the DCT), `(y, h, x·w)` in `rows` (subnet 38 without it). For a vector: `(x, w)`. Without a
    `target`, indices address the whole tensor. None for a parameter of zero or more than two
    dimensions, which neither subnet has.
    """
    if target is None:
        return (math.prod(shape),)
    if len(shape) not in (1, 2):
        return None
    edges = [chunk_edge(length, target) for length in shape]
    counts = [length // edge for length, edge in zip(shape, edges, strict=True)]
    if len(shape) == 1:
        return (counts[0], edges[0])
    if layout == "blocks":
        return (counts[0], counts[1], edges[0] * edges[1])
    return (counts[0], edges[0], shape[1])
