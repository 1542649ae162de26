"""The loss as it comes: NaN, spikes, divergence, plateau and convergence, overfitting.

Streaming, in bounded memory. Constants from measurements on simulated and real curves: window 64,
warm-up 32, x − median > max(6 · 1.4826 · MAD, 0.10 · |median|); two in a row had no false alarm in
10,000 steps at 1 % and 5 % noise and missed none. One alone is a remark. Flagged values stay out of
the window until half a window of them has come in a row.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from miner_guard.config import LossSettings
from miner_guard.detectors import advice
from miner_guard.detectors.advice import Anomaly
from miner_guard.detectors.eta import TrainingFacts
from miner_guard.detectors.trend import p_rising, p_rising_trimmed
from miner_guard.detectors.window import MAD_TO_SIGMA, SortedWindow

_LOCAL = 8
_LOCAL_LEAST = 8
_LOCAL_FACTOR = 8.0
_LOCAL_EXCESS = 0.25
"""The local rule, for a loss that still falls fast, where the spread of 64 values is mostly
descent: beyond the median of the last 8 by 25 % and by 8 sigma of the noise from step to step, its
drift taken out."""

_EXPLOSION_STEPS = 5
_CHECK_EVERY = 16
_BLOCKS = 32
_MIN_DELTA = 0.01
"""Relative improvement of the smoothed best below which nothing has improved."""

_LEARNED = 0.10
"""A loss that has fallen by this share of its first level has learned: a later plateau is
convergence."""


class LossWatch:
    """Streaming judge of one loss curve. Silent about what healthy training does."""

    def __init__(self, settings: LossSettings) -> None:
        self._settings = settings
        self._window = SortedWindow(settings.window)
        self._local = SortedWindow(_LOCAL)
        self._changes = SortedWindow(settings.window)
        self._previous: float | None = None
        self._spikes_in_row = 0
        self._high_in_row = 0
        self._exploded = False
        self._not_finite = False
        self._trend = Divergence(settings)
        self._plateau = Plateau(settings)

    def observe(
        self, step: int, loss: float, facts: TrainingFacts, lr: float | None = None
    ) -> Iterator[Anomaly]:
        """Judge the loss of one step. A value that is not finite is kept out of every window."""
        if not math.isfinite(loss):
            if not self._not_finite:
                self._not_finite = True
                yield not_finite(step, loss, facts, lr)
            return
        self._not_finite = False
        spike = self._spike(step, loss, facts, lr)
        if spike is not None:
            yield spike
        elif self._spikes_in_row == 0:
            yield from self._trend.observe(step, loss, lr)
            yield from self._plateau.observe(step, loss, lr)

    def _spike(
        self, step: int, loss: float, facts: TrainingFacts, lr: float | None
    ) -> Anomaly | None:
        window = self._window
        limit = self._limit()
        if limit is None or loss <= limit:
            self._spikes_in_row = self._high_in_row = 0
            self._exploded = False
            self._admit(loss)
            return None
        median = self._local.median
        self._spikes_in_row += 1
        self._high_in_row = (
            self._high_in_row + 1 if loss > self._settings.explosion_ratio * abs(median) else 0
        )
        if self._spikes_in_row >= window.size // 2:
            # What has lasted half a window is the new level.
            self._admit(loss)
        if self._high_in_row >= _EXPLOSION_STEPS and not self._exploded:
            self._exploded = True
            return explosion(step, loss, median, self._high_in_row, lr)
        if self._spikes_in_row > 2:
            return None
        cause, fixes = advice.for_spike(facts, step, lr)
        times = "one step" if self._spikes_in_row == 1 else "two steps in a row"
        return Anomaly(
            "spike",
            step,
            "info" if self._spikes_in_row == 1 else "warning",
            f"loss {loss:.4g} against a median of {median:.4g} over the last {len(self._local)} "
            "steps, "
            f"limit {limit:.4g}, {times}",
            fixes,
            cause,
            {"loss": loss, "median": median, "limit": limit, "window": len(self._window)},
        )

    def _limit(self) -> float | None:
        """What the next loss may be at most; None while too little is known."""
        if len(self._local) < _LOCAL_LEAST:
            return None
        level = self._local.median
        noise = MAD_TO_SIGMA * self._changes.mad() / math.sqrt(2)
        limit = level + max(_LOCAL_FACTOR * noise, _LOCAL_EXCESS * abs(level))
        if len(self._window) < self._settings.warmup:
            return limit
        return min(
            limit,
            self._window.robust_limit(self._settings.mad_factor, self._settings.min_excess_ratio),
        )

    def _admit(self, loss: float) -> None:
        self._window.add(loss)
        self._local.add(loss)
        if self._previous is not None:
            self._changes.add(loss - self._previous)
        self._previous = loss


class Divergence:
    """A loss that climbs: P(slope > 0) over the last points, plain and trimmed, and clearly above
    its best level."""

    def __init__(self, settings: LossSettings) -> None:
        self._points: deque[float] = deque(maxlen=max(2 * settings.divergence_points, 60))
        self._least = settings.divergence_points
        self._p = settings.divergence_p
        self._since = 0
        self._best: tuple[float, int] | None = None

    def observe(self, step: int, loss: float, lr: float | None) -> Iterator[Anomaly]:
        """Take one loss; an anomaly when it has become certain, each time at a higher bar."""
        self._points.append(loss)
        self._since += 1
        if self._since % _CHECK_EVERY or len(self._points) < self._least:
            return
        half = list(self._points)[-self._least // 2 :]
        level = sorted(half)[len(half) // 2]
        if self._best is None or level < self._best[0]:
            self._best = (level, step)
            return
        values = list(self._points)
        certain = min(p_rising(values), p_rising_trimmed(values)) > self._p
        if not certain or level - self._best[0] <= 0.10 * abs(self._best[0]):
            return
        best, best_step = self._best
        cause, fixes = advice.for_divergence(lr, best_step)
        # The next alarm needs a new climb from here, and more certainty.
        self._p = 1 - (1 - self._p) / 10
        self._best = (level, step)
        self._points.clear()
        yield Anomaly(
            "divergence",
            step,
            "warning",
            f"loss rose from {best:.4g} (best level, step {best_step}) to {level:.4g}; P(rising) "
            f"> {self._p:.3f} "
            f"over the last {len(values)} steps",
            fixes,
            cause,
            {"best": best, "best_step": best_step, "level": level, "window": len(values)},
        )


class Plateau:
    """No lower level for `plateau_steps`: convergence where it had learned, else a model that does
    not learn."""

    def __init__(self, settings: LossSettings) -> None:
        self._steps = settings.plateau_steps
        self._size = max(1, settings.plateau_steps // _BLOCKS)
        self._sum = 0.0
        self._count = 0
        self._blocks: deque[float] = deque(maxlen=_BLOCKS)
        self._first: float | None = None
        self._best = math.inf
        self._since_best = 0
        self._said = False

    def observe(self, step: int, loss: float, lr: float | None) -> Iterator[Anomaly]:
        """Take one loss; a remark once per plateau."""
        self._sum += loss
        self._count += 1
        self._since_best += 1
        if self._count < self._size:
            return
        level = self._sum / self._count
        self._sum, self._count = 0.0, 0
        self._blocks.append(level)
        self._first = level if self._first is None else self._first
        if level < self._best - _MIN_DELTA * abs(self._best) or self._best == math.inf:
            self._best, self._since_best, self._said = level, 0, False
            return
        if self._said or self._since_best < self._steps or len(self._blocks) < _BLOCKS:
            return
        blocks = list(self._blocks)
        if 1 - p_rising(blocks) > 0.9 or 1 - p_rising_trimmed(blocks) > 0.9:
            return
        self._said = True
        yield self._anomaly(step, level, lr)

    def _anomaly(self, step: int, level: float, lr: float | None) -> Anomaly:
        assert self._first is not None
        fallen = (self._first - self._best) / abs(self._first) if self._first else 0.0
        seen = {
            "first": self._first,
            "best": self._best,
            "level": level,
            "window": self._since_best,
        }
        if fallen >= _LEARNED:
            text = (
                f"converged: loss {level:.4g}, {fallen:.0%} below its first, no lower for "
                f"{self._since_best} steps"
            )
            return Anomaly(
                "plateau_high",
                step,
                "info",
                text,
                (),
                "healthy convergence, or time for a lower LR",
                seen,
            )
        cause, fixes = advice.for_plateau(lr)
        text = (
            f"loss {level:.4g}, {fallen:.1%} below its first level after {self._since_best} "
            "steps without a decrease"
        )
        return Anomaly("plateau_high", step, "info", text, fixes, cause, seen)


class OverfitWatch:
    """Evaluation that has risen from its best level while training fell.

    A level is the median of three evaluations. It must lie 3 % above the best one, and six sigmas
    of the noise (of second differences, which a trend leaves alone): the best of many noisy levels
    is low by chance. And the evaluations since then rise with P > 0.99, six of them at least.
    Simulated, 100 evaluations that stay flat with 2 % noise: an alarm in 1 of 200 runs; without the
    noise in the limit, in 140.
    """

    _LEVEL = 3
    _KEPT = 32
    _GAP = 0.03
    _GAP_SIGMAS = 6.0

    def __init__(self, settings: LossSettings) -> None:
        self._least = settings.overfit_evals
        self._p = settings.divergence_p
        self._recent: deque[tuple[int, float]] = deque(maxlen=self._LEVEL)
        self._bends: deque[float] = deque(maxlen=self._KEPT)
        self._since: deque[float] = deque(maxlen=max(self._KEPT, self._least))
        self._best: tuple[float, int, float] | None = None
        self._said = False
        self._not_finite = False

    def observe(self, step: int, eval_loss: float, train_loss: float) -> Anomaly | None:
        """Take one evaluation with the training loss of that time. One that is not finite is said,
        then left out."""
        before, self._not_finite = self._not_finite, not math.isfinite(eval_loss)
        if self._not_finite or not math.isfinite(train_loss):
            return (
                evaluation_not_finite(step, eval_loss, train_loss)
                if self._not_finite and not before
                else None
            )
        self._recent.append((step, eval_loss))
        if len(self._recent) < self._LEVEL:
            return None
        first, middle, last = (value for _, value in self._recent)
        self._bends.append(abs(first - 2 * middle + last))
        level = sorted((first, middle, last))[1]
        if self._best is None or level < self._best[0]:
            lowest = min(self._recent, key=lambda seen: seen[1])[0]
            self._best, self._said = (level, lowest, train_loss), False
            self._since.clear()
            self._since.extend((first, middle))
        self._since.append(eval_loss)
        return self._judge(step, level, train_loss, *self._best)

    def _judge(
        self,
        step: int,
        level: float,
        train_loss: float,
        best: float,
        best_step: int,
        best_train: float,
    ) -> Anomaly | None:
        gap = max(self._GAP * abs(best), self._GAP_SIGMAS * self._noise())
        if (
            self._said
            or len(self._since) < self._least
            or level - best <= gap
            or train_loss >= best_train
        ):
            return None
        if p_rising(self._since) <= self._p:
            return None
        self._said = True
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

    def _noise(self) -> float:
        """Standard deviation of one evaluation; a second difference has the variance of six."""
        return MAD_TO_SIGMA * statistics.median(self._bends) / math.sqrt(6)


def not_finite(step: int, loss: float, facts: TrainingFacts, lr: float | None) -> Anomaly:
    """The finding for a NaN or infinite loss at `step`."""
    cause, fixes = advice.for_nan(facts, step, lr)
    examples = advice.example_range(facts, step)
    seen = {"loss": repr(loss), "examples": list(examples) if examples else None}
    return Anomaly("nan", step, "critical", f"loss is {loss} at step {step}", fixes, cause, seen)


def evaluation_not_finite(step: int, eval_loss: float, train_loss: float) -> Anomaly:
    """The finding for an evaluation at `step` that is NaN or infinite."""
    cause, fixes = advice.for_evaluation_nan()
    detail = (
        f"evaluation loss is {eval_loss} at step {step}, beside a training loss of {train_loss:.4g}"
    )
    return Anomaly(
        "eval_nan", step, "warning", detail, fixes, cause, {"eval_loss": repr(eval_loss)}
    )


def hides_nan(loss: float, grad_norm: float | None) -> bool:
    """Whether a loss of exactly 0 stands for NaN: HF Trainer shows it so, beside a gradient norm
    that is none."""
    return loss == 0.0 and grad_norm is not None and not math.isfinite(grad_norm)


def hidden_nan(step: int, grad_norm: float, facts: TrainingFacts, lr: float | None) -> Anomaly:
    """The finding for a loss of 0.0 with a gradient norm that is not finite."""
    anomaly = not_finite(step, 0.0, facts, lr)
    detail = (
        f"loss is 0.0 at step {step} with a gradient norm of {grad_norm}, which stands for "
        "NaN in HF Trainer"
    )
    return replace(
        anomaly, detail=detail, evidence={**anomaly.evidence, "grad_norm": repr(grad_norm)}
    )


def explosion(step: int, loss: float, median: float, steps: int, lr: float | None) -> Anomaly:
    """The finding for a loss that has stayed at a multiple of its level."""
    cause, fixes = advice.for_divergence(lr, step - steps)
    return Anomaly(
        "divergence",
        step,
        "critical",
        f"loss {loss:.4g}, for {steps} steps beyond twice its median of {median:.4g}",
        fixes,
        cause,
        {"loss": loss, "median": median, "steps": steps},
    )
