"""How subnet 38 and Templar cut a parameter into chunks before they keep the largest values of each.

The edge of a chunk is the largest divisor of a dimension that does not exceed the target (DeMo's transform,
`_get_smaller_split` in utils/compression.py of dstrbtd/DistributedTraining).
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def chunk_edge(length: int, target: int) -> int:
    """The largest divisor of `length` up to `target`."""
    return next(edge for edge in range(min(target, length), 0, -1) if length % edge == 0)


def layouts(shape: Sequence[int], target: int | None) -> list[tuple[list[int] | None, int]]:
    """What an index tensor of a parameter may look like: its shape without the last dimension, and the indices' bound.

    Without a `target` indices count through the whole tensor, in any shape (None). With one there are two: with the
    DCT a matrix is `[y, x, k]` chunks of `h·w`; without it the same code keeps `[y, h, k]` of rows of `x·w`.
    """
    if target is None or not shape:
        return [(None, math.prod(shape))]
    edges = [chunk_edge(length, target) for length in shape]
    counts = [length // edge for length, edge in zip(shape, edges, strict=True)]
    found: list[tuple[list[int] | None, int]] = [(list(counts), math.prod(edges))]
    if len(shape) == 2:
        found.append(([counts[0], edges[0]], shape[1]))
    return found
