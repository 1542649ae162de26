"""Judges the loss as it arrives: NaN, spikes, divergence, plateau and convergence, overfitting.

Streaming, in bounded memory. Constants from measurements on simulated and real curves: window 64,
warm-up 32, x − median > max(6 · 1.4826 · MAD, 0.10 · |median|). A warning also requires 1.5 times
the level, or a second outlier in a row, and a jump larger than the run's earlier dips and jumps;
any other outlier is a remark. LossWatch issues the warning when the loss is back at its level, or
after five steps: a loss that stays at twice its level has exploded, which is one alarm, not two.
Outliers stay out of the window until half a window of them arrives in a row. docs/diagnosis.md has
the figures.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from miner_guard.config import LossSettings
from miner_guard.detectors import advice
from miner_guard.detectors.advice import Anomaly
from miner_guard.detectors.divergence import SEEN_BEFORE, Divergence, explosion
from miner_guard.detectors.eta import TrainingFacts
from miner_guard.detectors.plateau import Plateau
from miner_guard.detectors.window import MAD_TO_SIGMA, SortedWindow

_LOCAL = 8
_MIN_LOCAL = 8
_LOCAL_FACTOR = 8.0
_LOCAL_EXCESS = 0.25
"""The local rule. While a loss falls fast, its spread over 64 values is mostly descent, so an
outlier must exceed the median of the last 8 values by 25 % and by 8 sigma of the step-to-step
noise, with the drift removed."""

_MIN_FIRST = 3
_FIRST_FACTOR = 5.0
"""The rule for the first values of a run or a log: a loss starts high, so a value far above the
highest of them is an outlier. Five in a row count as an explosion, just as they do later in a
run."""

_MAX_FIRST_SPREAD = 3.0
"""If the highest of the first values exceeds the lowest by more than this factor, as in a
policy-gradient loss around zero, they do not establish a level."""

_STRONG_RATIO = 1.5
"""A value at this multiple of its level needs no second value to confirm it."""

_CONFIRMED_RATIO = 1.2
"""The second outlier in a row must reach this multiple of the level: a warm restart of the learning
rate raises the loss by only 5 to 15 %."""

_TAIL = 2.0
_FORGET = 0.998
"""An upward jump must be `_TAIL` times the deepest dip of a value below both its neighbours,
because heavy-tailed noise jumps both ways while a spike only goes up. `_FORGET` fades an old dip
with a half-life of 350 values."""

_EXPLOSION_STEPS = 5


class LossWatch:
    """Judges one loss curve, step by step. Silent on healthy training."""

    def __init__(self, settings: LossSettings) -> None:
        self._settings = settings
        self._window = SortedWindow(settings.window)
        self._local = SortedWindow(_LOCAL)
        self._changes = SortedWindow(settings.window)
        self._two: deque[float] = deque(maxlen=2)
        """The last two values that were not outliers."""

        self._spikes_in_row = 0
        self._high_in_row = 0
        self._exploded = False
        self._warned = False
        self._held: Anomaly | None = None
        """A spike warning held back because the spike may still prove to be the first step of an
        explosion."""

        self._strong = False
        """True if the spike is high enough to need no confirmation. A lower one counts only if it
        ends soon: a loss that jumps by a fifth at the end of each epoch takes the whole next
        epoch to come back."""

        self._dip = self._jump = self._top = 0.0
        self._not_finite = False
        self._trend = Divergence(settings)
        self._plateau = Plateau(settings)

    def observe(
        self, step: int, loss: float, facts: TrainingFacts, lr: float | None = None
    ) -> Iterator[Anomaly]:
        """Judge the loss of one step. Non-finite values stay out of every window."""
        if not math.isfinite(loss):
            if not self._not_finite:
                self._not_finite, self._held = True, None
                yield not_finite(step, loss, facts, lr)
            return
        self._not_finite = False
        spike = self._spike(step, loss, facts, lr)
        if spike is not None:
            yield spike
        if self._held is not None and self._alone():
            if self._strong or self._returned(loss, self._held):
                yield self._held
            self._held = None
        if self._spikes_in_row == 0:
            yield from self._trend.observe(step, loss, lr)
            yield from self._plateau.observe(step, loss, lr)

    def _returned(self, loss: float, spike: Anomaly) -> bool:
        """Return whether the loss has recovered by more than half of the jump."""
        level = spike.evidence["median"]
        back = _rise(loss, level) < _rise(spike.evidence["loss"], level) / 2
        return self._spikes_in_row == 0 and back

    def _alone(self) -> bool:
        """Return whether the outliers have ended, or do not amount to an explosion."""
        return self._spikes_in_row == 0 or (
            self._high_in_row == 0 and self._spikes_in_row >= _EXPLOSION_STEPS
        )

    def _spike(
        self, step: int, loss: float, facts: TrainingFacts, lr: float | None
    ) -> Anomaly | None:
        window = self._window
        limit = self._limit()
        if limit is None or loss <= limit:
            self._spikes_in_row = self._high_in_row = 0
            self._exploded = self._warned = False
            self._jump, self._top = max(_FORGET * self._jump, self._top), 0.0
            self._dip = max(_FORGET * self._dip, self._dipped(loss))
            self._admit(loss)
            return None
        median = self._local.median
        self._spikes_in_row += 1
        self._high_in_row = (
            self._high_in_row + 1 if loss > self._settings.explosion_ratio * abs(median) else 0
        )
        if self._spikes_in_row >= window.size // 2:
            # If outliers continue for half a window, they are the new level.
            self._admit(loss)
        rise = _rise(loss, median)
        self._top = max(self._top, rise)
        if self._high_in_row >= _EXPLOSION_STEPS and not self._exploded:
            self._exploded, self._held = True, None
            self._trend.reported()
            return explosion(step, loss, median, steps=self._high_in_row, lr=lr)
        if self._spikes_in_row > 2:
            return None
        known = len(window) >= self._settings.warmup
        strong = known and loss >= _STRONG_RATIO * median > 0
        again = (
            self._spikes_in_row > 1
            and loss >= _CONFIRMED_RATIO * median
            and rise > SEEN_BEFORE * self._jump
        )
        certain = (strong or again) and rise > _TAIL * self._dip and not self._warned
        self._warned = self._warned or certain
        cause, fixes = advice.for_spike(facts, step, lr)
        times = "one step" if self._spikes_in_row == 1 else "two steps in a row"
        seen = Anomaly(
            "spike",
            step,
            "info",
            f"loss {loss:.4g} vs. a median of {median:.4g} over the last {len(self._local)} steps "
            f"(limit {limit:.4g}), {times}",
            fixes,
            cause,
            {"loss": loss, "median": median, "limit": limit, "window": len(self._window)},
        )
        if certain:
            self._held, self._strong = replace(seen, severity="warning"), strong
        return None if self._held is not None and self._spikes_in_row > 1 else seen

    def _dipped(self, loss: float) -> float:
        """Return how far the value before `loss` dips below both its neighbours."""
        if len(self._two) < 2:
            return 0.0
        earlier, low = self._two
        return min(_rise(earlier, low), _rise(loss, low))

    def _limit(self) -> float | None:
        """The highest acceptable next loss; None while there are too few values."""
        if len(self._local) < _MIN_LOCAL:
            return self._first_limit()
        level = self._local.median
        noise = MAD_TO_SIGMA * self._changes.mad() / math.sqrt(2)
        limit = level + max(_LOCAL_FACTOR * noise, _LOCAL_EXCESS * abs(level))
        if len(self._window) < self._settings.warmup:
            return limit
        return min(
            limit,
            self._window.robust_limit(self._settings.mad_factor, self._settings.min_excess_ratio),
        )

    def _first_limit(self) -> float | None:
        """The limit before the level is known; only an explosion exceeds it."""
        if len(self._local) < _MIN_FIRST:
            return None
        lowest, highest = self._local.quantile(0.0), self._local.quantile(1.0)
        steady = 0 < highest <= _MAX_FIRST_SPREAD * lowest
        return _FIRST_FACTOR * highest if steady else None

    def _admit(self, loss: float) -> None:
        self._window.add(loss)
        self._local.add(loss)
        if self._two:
            self._changes.add(loss - self._two[-1])
        self._two.append(loss)


def _rise(loss: float, level: float) -> float:
    """Return how far `loss` is above `level`: the logarithm of their ratio if both are positive."""
    return math.log(loss) - math.log(level) if loss > 0 < level else loss - level


def not_finite(step: int, loss: float, facts: TrainingFacts, lr: float | None) -> Anomaly:
    """The finding for a NaN or infinite loss at `step`."""
    cause, fixes = advice.for_nan(facts, step, lr)
    examples = advice.example_range(facts, step)
    seen = {"loss": repr(loss), "examples": list(examples) if examples else None}
    return Anomaly("nan", step, "critical", f"loss is {loss} at step {step}", fixes, cause, seen)


def hides_nan(loss: float, grad_norm: float | None) -> bool:
    """Return whether a loss of exactly 0 hides a NaN: HF Trainer prints 0 together with a
    non-finite gradient norm."""
    return loss == 0.0 and grad_norm is not None and not math.isfinite(grad_norm)


def hidden_nan(step: int, grad_norm: float, facts: TrainingFacts, lr: float | None) -> Anomaly:
    """The finding for a loss of 0.0 with a non-finite gradient norm."""
    anomaly = not_finite(step, 0.0, facts, lr)
    detail = (
        f"loss is 0.0 at step {step} with a gradient norm of {grad_norm}: HF Trainer prints "
        "0 for NaN"
    )
    return replace(
        anomaly, detail=detail, evidence={**anomaly.evidence, "grad_norm": repr(grad_norm)}
    )
