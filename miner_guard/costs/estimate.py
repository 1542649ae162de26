"""Estimates an operation's cost before it is enabled."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """The cost of one operation over a number of training steps. `overhead_pct` is the percentage
    of training time."""

    calls: float
    cost_s: float
    training_s: float
    overhead_pct: float


def estimate(*, steps: int, every_steps: int, seconds: float, step_time_s: float) -> Estimate:
    """Source 000's calculation: calls · seconds / (steps · step time).

    Truncates the number of calls to a tenth, as the document does (2487 steps with a call every 500
    make 4.9 calls). Raises ValueError for numbers that are not positive.
    """
    if min(steps, every_steps, step_time_s) <= 0 or seconds < 0:
        raise ValueError(
            "steps, interval and step time must be positive, and the call time must not be negative"
        )
    calls = math.floor(10 * steps / every_steps) / 10
    cost, training = calls * seconds, steps * step_time_s
    return Estimate(calls, cost, training, 100 * cost / training)
