"""Judges evaluations as they arrive: reports a loss that is not finite, or that rises while the
training loss falls."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Sequence

from miner_guard.config import LossSettings
from miner_guard.detectors import advice
from miner_guard.detectors.advice import Anomaly
from miner_guard.detectors.trend import p_rising
from miner_guard.detectors.window import MAD_TO_SIGMA

MIN_EVALUATIONS = 5
"""Number of evaluations before the first verdict."""

MIN_FOR_LEVEL = 15
"""With fewer evaluations than this, each is judged individually; with this many or more, a smoothed
level is judged."""

TRAIN_FALL = 0.05
"""The training loss must have fallen by this share since the best evaluation."""

_AFTER = 4
_AFTER_MONOTONE = 3
"""This many evaluations after the best one suffice if each is worse than the one before."""

_RISE = 1.12
_STEADY_RISE = 1.05
_STEADY_AFTER = 8
_STEADY = 0.8
_RISING = 0.2


def rises(best: float, last: float, rising: float, after: int) -> bool:
    """Return whether the evaluation loss has risen permanently above its `best` value. `after` is
    the number of evaluations since then, `rising` their Kendall's tau, and `last` the current
    level. Used both for live runs and for finished ones."""
    if best <= 0 or after < (_AFTER_MONOTONE if rising == 1 else _AFTER):
        return False
    steady = last >= _STEADY_RISE * best and rising >= _STEADY and after >= _STEADY_AFTER
    return steady or (last >= _RISE * best and rising >= _RISING)


def kendall(values: Sequence[float]) -> float:
    """Kendall's tau against the order of the values. A long series is thinned to at most 400 evenly
    spaced values."""
    stride = max(1, len(values) // 200)
    kept = list(values)[::stride]
    pairs = len(kept) * (len(kept) - 1) // 2
    if not pairs:
        return 0.0
    signs = sum((b > a) - (b < a) for n, a in enumerate(kept) for b in kept[n + 1 :])
    return signs / pairs


class OverfitWatch:
    """Detects an evaluation loss that has risen from its best level while the training loss fell.

    A level is the median of three evaluations. It must exceed the best one by 3 % and by six noise
    sigmas (measured on second differences, which a trend does not affect), because the best of many
    noisy levels is low by chance. In addition, at least six evaluations since the best one must
    rise with P > 0.99. The first evaluations are judged by the rule for finished runs (`rises`),
    for which five may suffice.

    In a simulation of 200 flat runs with 100 evaluations each and 2 % noise, one run raises an
    alarm; if the limit ignored the noise, 140 would.
    """

    _LEVEL = 3
    _KEPT = 32
    _GAP = 0.03
    _GAP_SIGMAS = 6.0

    def __init__(self, settings: LossSettings) -> None:
        self._min_evals = settings.overfit_evals
        self._p = settings.divergence_p
        self._recent: deque[tuple[int, float]] = deque(maxlen=self._LEVEL)
        self._bends: deque[float] = deque(maxlen=self._KEPT)
        self._since: deque[float] = deque(maxlen=max(self._KEPT, self._min_evals))
        self._best: tuple[float, int, float] | None = None
        self._all: list[tuple[int, float, float]] = []
        """The first evaluations: step, loss and training loss."""

        self._reported = False
        self._not_finite = False

    def observe(self, step: int, eval_loss: float, train_loss: float) -> Anomaly | None:
        """Judge one evaluation, given the training loss at that time. A non-finite one is reported,
        then left out."""
        before, self._not_finite = self._not_finite, not math.isfinite(eval_loss)
        if self._not_finite or not math.isfinite(train_loss):
            return (
                evaluation_not_finite(step, eval_loss, train_loss)
                if self._not_finite and not before
                else None
            )
        self._recent.append((step, eval_loss))
        if len(self._all) < MIN_FOR_LEVEL:
            self._all.append((step, eval_loss, train_loss))
        if len(self._recent) < self._LEVEL:
            return None
        first, middle, last = (value for _, value in self._recent)
        self._bends.append(abs(first - 2 * middle + last))
        level = sorted((first, middle, last))[1]
        if self._best is None or level < self._best[0]:
            lowest = min(self._recent, key=lambda seen: seen[1])[0]
            self._best, self._reported = (level, lowest, train_loss), False
            self._since.clear()
            self._since.extend((first, middle))
        self._since.append(eval_loss)
        return self._judge_few(step) or self._judge(step, level, train_loss, self._best)

    def _judge_few(self, step: int) -> Anomaly | None:
        """Judge the first few evaluations one by one, because there are too few for medians of
        three."""
        seen = self._all
        if self._reported or len(seen) < MIN_EVALUATIONS or len(seen) >= MIN_FOR_LEVEL:
            return None
        at = min(range(len(seen)), key=lambda n: seen[n][1])
        best_step, best, best_train = seen[at]
        after = [value for _, value, _ in seen[at:]]
        last, train_loss = statistics.median(after[-self._LEVEL :]), seen[-1][2]
        clear = rises(best, last, kendall(after), len(after) - 1)
        if not clear or last - best <= self._GAP_SIGMAS * max(_noise(after), _sigma(self._bends)):
            return None
        if train_loss > best_train - TRAIN_FALL * abs(best_train):
            return None
        return self._anomaly(step, last, train_loss, (best, best_step, best_train))

    def _judge(
        self, step: int, level: float, train_loss: float, lowest: tuple[float, int, float]
    ) -> Anomaly | None:
        """Judge the latest level; `lowest` is the best level, its step and the training loss at
        that step."""
        best, _, best_train = lowest
        gap = max(self._GAP * abs(best), self._GAP_SIGMAS * _sigma(self._bends))
        if (
            self._reported
            or len(self._since) < self._min_evals
            or level - best <= gap
            or train_loss >= best_train
        ):
            return None
        if p_rising(self._since) <= self._p:
            return None
        return self._anomaly(step, level, train_loss, lowest)

    def _anomaly(
        self, step: int, level: float, train_loss: float, lowest: tuple[float, int, float]
    ) -> Anomaly:
        best, best_step, best_train = lowest
        self._reported = True
        cause, fixes = advice.for_overfit(best_step)
        return Anomaly(
            "overfit",
            step,
            "warning",
            f"evaluation loss {level:.4g}, best {best:.4g} at step {best_step}, "
            f"while training loss fell from {best_train:.4g} to {train_loss:.4g}",
            fixes,
            cause,
            {"best": best, "best_step": best_step, "evaluations": len(self._since)},
        )


def _noise(values: Sequence[float]) -> float:
    return _sigma(
        [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    )


def _sigma(bends: Collection[float]) -> float:
    """Standard deviation of one evaluation; a second difference has six times the variance."""
    return MAD_TO_SIGMA * statistics.median(bends) / math.sqrt(6) if bends else 0.0


def evaluation_not_finite(step: int, eval_loss: float, train_loss: float) -> Anomaly:
    """The finding for an evaluation at `step` that is NaN or infinite."""
    cause, fixes = advice.for_evaluation_nan()
    detail = (
        f"evaluation loss is {eval_loss} at step {step}, with a training loss of {train_loss:.4g}"
    )
    return Anomaly(
        "eval_nan", step, "warning", detail, fixes, cause, {"eval_loss": repr(eval_loss)}
    )
