"""Finds single values that stand out from those before and after them: loss spikes and slow steps.

A value is compared with the median before it and the median after it, and must exceed the higher
one, so the edge of a lasting change is not an outlier. The noise is the MAD of both sides around
their medians. It is computed from logarithms if all values are positive, because the noise in
losses and times grows with their level.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

from miner_guard.detectors.window import MAD_TO_SIGMA, SortedWindow

_MIN_NOISE = 0.0005


@dataclass(frozen=True)
class OutlierRule:
    """The criteria for an outlier."""

    window: int
    min_before: int
    """Minimum number of values before an outlier; if 0, the first step is judged by the values
    after it."""

    levels: tuple[tuple[float, float], ...]
    """(ratio to the level, noise sigmas) pairs, smaller ratios last: the smaller the ratio, the
    more sigmas it needs."""

    max_length: int
    """A longer streak is a level change, not outliers."""


SPIKE = OutlierRule(
    window=32, min_before=5, levels=((1.9, 5.0), (1.3, 6.0), (1.03, 25.0)), max_length=8
)
SLOW = OutlierRule(
    window=25, min_before=0, levels=((1.5, 4.0), (1.3, 5.0), (1.15, 7.5)), max_length=8
)


@dataclass(frozen=True)
class Outlier:
    """One value that stands out."""

    index: int
    value: float
    level: float
    sigmas: float

    @property
    def ratio(self) -> float:
        """The value divided by the level."""
        return self.value / self.level if self.level else math.inf


def outliers(values: Sequence[float], rule: OutlierRule) -> list[Outlier]:
    """Return all outliers in order. `values` must be finite."""
    return select(candidates(values, rule), rule)


@lru_cache(maxsize=2)
def deepest_dip(values: tuple[float, ...]) -> float:
    """Return how many sigmas deep the deepest downward outlier is, judged by the rule for upward
    spikes; 0 if no value qualifies, or if some values are not positive."""
    if not values or min(values) <= 0:
        return 0.0
    upside_down = outliers([1 / value for value in values], SPIKE)
    return max((o.sigmas for o in upside_down), default=0.0)


def select(every: Iterable[Outlier], rule: OutlierRule) -> list[Outlier]:
    """The `candidates` that the rule accepts as outliers."""
    found = [o for o in every if o.sigmas >= _needed(o.ratio, rule)]
    return [o for run in runs(found, 1) if len(run) <= rule.max_length for o in run]


def runs(found: Sequence[Outlier], gap: int) -> Iterator[list[Outlier]]:
    """Groups of outliers, each within `gap` places of the one before."""
    group: list[Outlier] = []
    for outlier in found:
        if group and outlier.index - group[-1].index > gap:
            yield group
            group = []
        group.append(outlier)
    if group:
        yield group


def _needed(ratio: float, rule: OutlierRule) -> float:
    return next((sigmas for minimum, sigmas in rule.levels if ratio >= minimum), math.inf)


def candidates(values: Sequence[float], rule: OutlierRule) -> Iterator[Outlier]:
    """Values whose ratio to the medians on both sides exceeds the rule's minimum ratio, each with
    its sigmas."""
    size, count = rule.window, len(values)
    before, after = SortedWindow(size), SortedWindow(size)
    for value in values[1 : size + 1]:
        after.add(value)
    minimum = rule.levels[-1][0]
    for place, value in enumerate(values):
        enough = len(before) + min(size, count - 1 - place) >= 8 and len(before) >= rule.min_before
        if enough:
            level = _level(before, after, count - 1 - place)
            if level is not None and (value > minimum * level if level > 0 else value > level):
                sigmas = _sigmas(values, place, size, level)
                yield Outlier(place, value, level, sigmas)
        before.add(value)
        following = place + 1 + size
        if following < count:
            after.add(values[following])
        elif len(after):
            after.drop_oldest()


def _level(before: SortedWindow, after: SortedWindow, left: int) -> float | None:
    sides = [side.median for side, length in ((before, len(before)), (after, left)) if length >= 4]
    return max(sides) if sides else None


def _sigmas(values: Sequence[float], place: int, size: int, level: float) -> float:
    sides = [values[max(0, place - size) : place], values[place + 1 : place + 1 + size]]
    positive = values[place] > 0 and level > 0 and all(v > 0 for side in sides for v in side)
    scale = math.log if positive else float
    rest: list[float] = []
    for side in sides:
        scaled = [scale(v) for v in side]
        if len(scaled) >= 4:
            middle = median(scaled)
            rest += [abs(v - middle) for v in scaled]
    noise = MAD_TO_SIGMA * median(rest) if rest else 0.0
    if positive:
        return math.log(values[place] / level) / max(noise, _MIN_NOISE)
    return (values[place] - level) / max(noise, _MIN_NOISE * abs(level), 1e-12)
