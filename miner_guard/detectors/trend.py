"""Computes the probability that a series rises, by ordinary least squares, plain or trimmed."""

from __future__ import annotations

import math
from collections.abc import Sequence


def p_rising(values: Sequence[float]) -> float:
    """P(slope > 0) of the least-squares line through `values` at 0, 1, 2, …; 0.5 if
    undetermined.

    Uses the normal approximation of the t statistic: for 30 or more points, its error is below
    0.005.
    """
    count = len(values)
    if count < 3:
        return 0.5
    mean_x = (count - 1) / 2
    mean_y = math.fsum(values) / count
    spread_x = count * (count * count - 1) / 12
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in enumerate(values)) / spread_x
    rest = math.fsum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in enumerate(values))
    if rest <= 0:
        return 0.5 if slope == 0 else float(slope > 0)
    error = math.sqrt(rest / (count - 2) / spread_x)
    return 0.5 * (1 + math.erf(slope / error / math.sqrt(2)))


def p_rising_trimmed(values: Sequence[float]) -> float:
    """`p_rising` without the largest tenth of the values: a few spikes must not create or hide a
    trend (dlib)."""
    keep = sorted(values)[: max(3, len(values) - len(values) // 10)]
    limit = keep[-1]
    return p_rising([v for v in values if v <= limit])
