"""Forecast: will the minimum inner step be reached before the repo goes stale?

Pure. What can be known 40 minutes ahead should not be said when it has happened.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

STEPS_KEPT = 20
"""Recent steps whose median is the step time of the forecast."""


@dataclass(frozen=True)
class Forecast:
    """When the minimum is reached and when the repo goes stale, both in seconds from now."""

    min_inner_step: int
    eta_s: float
    stale_s: float

    @property
    def late(self) -> bool:
        """The repo goes stale first."""
        return self.eta_s > self.stale_s


def forecast(*, inner_step: int, step_s: float, min_inner_step: int, age_s: float, limit_s: float) -> Forecast:
    """The forecast after `inner_step` inner steps of `step_s` seconds, for a repo `age_s` old."""
    left = max(min_inner_step - inner_step, 0)
    return Forecast(min_inner_step, left * step_s, max(limit_s - age_s, 0.0))


class StepTime:
    """The median of recent inner steps. The first of a launch does not count: it compiles and fills caches."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=STEPS_KEPT)

    def add(self, seconds: float) -> None:
        """One finished inner step."""
        self._recent.append(seconds)

    @property
    def seconds(self) -> float | None:
        """None before the first step."""
        return statistics.median(self._recent) if self._recent else None
