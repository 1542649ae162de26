"""A trace as read: one series per quantity, in file order."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from miner_guard.detectors.window import MAD_TO_SIGMA

QUANTITIES = ("loss", "eval_loss", "lr", "grad_norm", "step_time", "gpu_mem_gb")


@dataclass
class Series:
    """One quantity's values with their steps; non-finite ones are kept."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.values)

    def add(self, step: int, value: float) -> None:
        """Append one value."""
        self.steps.append(step)
        self.values.append(value)

    def finite(self) -> Series:
        """This series without non-finite values."""
        kept = [(s, v) for s, v in zip(self.steps, self.values, strict=True) if math.isfinite(v)]
        return Series([s for s, _ in kept], [v for _, v in kept])


@dataclass
class Trace:
    """All series from one run."""

    series: dict[str, Series] = field(
        default_factory=lambda: {name: Series() for name in QUANTITIES}
    )
    nan_said: list[int] = field(default_factory=list)
    """Steps at which guard.jsonl reports a NaN loss (its JSON has null there)."""

    lines: int = 0
    used: int = 0

    def __getitem__(self, name: str) -> Series:
        return self.series[name]

    def nearest(self, name: str, step: int) -> float | None:
        """Return the last finite value of `name` at or before `step`, or None. Assumes increasing
        steps."""
        series = self.series[name]
        for place in range(bisect_right(series.steps, step) - 1, -1, -1):
            if math.isfinite(series.values[place]):
                return series.values[place]
        return None


def centred(values: Sequence[float], width: int) -> list[float]:
    """Return the moving mean over `width` values around each; an even window extends one value
    further to the right."""
    left, right = (width - 1) // 2, width // 2 + 1
    means = []
    for place in range(len(values)):
        part = values[max(0, place - left) : place + right]
        means.append(math.fsum(part) / len(part))
    return means


def step_noise(values: Sequence[float]) -> float:
    """Standard deviation of the value-to-value noise: 1.4826 · median |difference| / sqrt 2."""
    if len(values) < 2:
        return 0.0
    return MAD_TO_SIGMA * median([abs(b - a) for a, b in itertools.pairwise(values)]) / math.sqrt(2)
