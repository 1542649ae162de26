"""Evaluation against training over a whole run: overfitting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from miner_guard.detectors.trace.series import Series, centred

_MIN_COUNT = 5
_AFTER = 4
_AFTER_MONOTONE = 3
"""This many evaluations after the best one suffice where each is worse than the one before."""

_SMOOTHED = 15
_RISE = 1.12
_STEADY_RISE = 1.05
_STEADY_AFTER = 8
_STEADY = 0.8
_RISING = 0.2
_TRAIN_FALL = 0.05


@dataclass(frozen=True)
class Overfit:
    """Evaluation was best at `step` and has risen since, while training continued falling."""

    step: int
    best: float
    last: float
    train_then: float
    train_last: float
    rising: float
    """Kendall's tau of the evaluations since: 1 rises steadily, 0 has no trend."""


def overfit(evaluation: Series, training: Series) -> Overfit | None:
    """Overfitting of a run, or None. Both series must be finite.

    The smoothed evaluation (means over a tenth of the run) ends 12 % above its minimum, or 5 %
    where it rises nearly all the time; at least four evaluations lie after the minimum, or three
    that rise one by one; training fell meanwhile.
    """
    if len(evaluation) < _MIN_COUNT or len(training) < _MIN_COUNT:
        return None
    width = max(3, len(evaluation) // 10) if len(evaluation) >= _SMOOTHED else 1
    smooth = centred(evaluation.values, width)
    # Whole windows only: a partial one at the start carries the noise of few values.
    at = min(range((width - 1) // 2, len(smooth) - width // 2), key=lambda n: smooth[n])
    after = evaluation.values[at:]
    best, last = smooth[at], median(smooth[-3:])
    rising = kendall(after)
    least = _AFTER_MONOTONE if rising == 1 else _AFTER
    if len(after) - 1 < least or best <= 0:
        return None
    steady = last >= _STEADY_RISE * best and rising >= _STEADY and len(after) - 1 >= _STEADY_AFTER
    if not steady and not (last >= _RISE * best and rising >= _RISING):
        return None
    then, now = _training(training, evaluation.steps[at])
    if now > then - _TRAIN_FALL * abs(then):
        return None
    return Overfit(evaluation.steps[at], best, last, then, now, rising)


def _training(training: Series, step: int) -> tuple[float, float]:
    """Training loss around `step` and at the end, as medians of the same number of values."""
    place = sum(s <= step for s in training.steps)
    width = max(3, len(training) // 20)
    around = training.values[max(0, place - width // 2 - 1) : place + width // 2 + 1]
    return median(around or training.values[-width:]), median(training.values[-width:])


def kendall(values: Sequence[float]) -> float:
    """Kendall's tau against the order of the values. A long series is sampled at 200 evenly spaced
    values."""
    stride = max(1, len(values) // 200)
    kept = list(values)[::stride]
    pairs = len(kept) * (len(kept) - 1) // 2
    if not pairs:
        return 0.0
    signs = sum((b > a) - (b < a) for n, a in enumerate(kept) for b in kept[n + 1 :])
    return signs / pairs
