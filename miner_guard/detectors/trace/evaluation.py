"""Detects overfitting by comparing evaluation with training over a whole run."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from miner_guard.detectors.overfit import MIN_EVALUATIONS, MIN_FOR_LEVEL, TRAIN_FALL, kendall, rises
from miner_guard.detectors.trace.series import Series, centred


@dataclass(frozen=True)
class Overfit:
    """Evaluation was best at `step` and has risen since, while the training loss continued to
    fall."""

    step: int
    best: float
    last: float
    train_then: float
    train_last: float
    rising: float
    """Kendall's tau of the evaluations since then: 1 means a steady rise, 0 no trend."""


def overfit(evaluation: Series, training: Series) -> Overfit | None:
    """Overfitting found in a run, or None. Both series must be finite.

    The smoothed evaluation loss (means over a tenth of the run) ends 12 % above its minimum, or 5 %
    if it rises almost steadily; at least four evaluations follow the minimum, or three that each
    exceed the one before; and the training loss fell in the meantime.
    """
    if len(evaluation) < MIN_EVALUATIONS or len(training) < MIN_EVALUATIONS:
        return None
    width = max(3, len(evaluation) // 10) if len(evaluation) >= MIN_FOR_LEVEL else 1
    smooth = centred(evaluation.values, width)
    # Whole windows only: a partial one at the start carries the noise of few values.
    at = min(range((width - 1) // 2, len(smooth) - width // 2), key=lambda n: smooth[n])
    after = evaluation.values[at:]
    best, last = smooth[at], median(smooth[-3:])
    rising = kendall(after)
    if not rises(best, last, rising, len(after) - 1):
        return None
    then, now = _training(training, evaluation.steps[at])
    if now > then - TRAIN_FALL * abs(then):
        return None
    return Overfit(evaluation.steps[at], best, last, then, now, rising)


def _training(training: Series, step: int) -> tuple[float, float]:
    """Training loss around `step` and at the end, as medians of the same number of values."""
    place = sum(s <= step for s in training.steps)
    width = max(3, len(training) // 20)
    around = training.values[max(0, place - width // 2 - 1) : place + width // 2 + 1]
    return median(around or training.values[-width:]), median(training.values[-width:])
