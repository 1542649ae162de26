"""Distinguishes regular pauses without a named phase (evaluation, checkpoint, end of an epoch) from
steps that become slow. Pure; counts in steps.

A single slow step is already over and needs no action. Three within 20 steps do need action, unless
they are periodic: then the program pauses on purpose.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

Kind = Literal["isolated", "periodic", "recurring"]

_WITHIN_STEPS = 20
_RECURRING = 3
"""This many slow steps within 20 steps count as a problem."""

_MIN_PERIOD = 10
"""Shortest period, in steps. If slow steps are more frequent, that is simply the program's
speed."""

_TOLERANCE = 0.02
"""Tolerance, as a fraction of the period: a checkpoint every ten minutes comes after a varying
number of steps."""

_MAX_MISSED = 4
"""A pause is still expected up to this many periods after the last one."""

_MAX_REMEMBERED = 16
_MAX_PERIODS = 8
_SIMILAR = 3.0
"""Largest ratio between the lengths of two pauses of the same kind."""


class PauseWatch:
    """Classifies slow steps one at a time. O(1) memory."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=_MAX_REMEMBERED)
        self._unexplained: deque[int] = deque(maxlen=_RECURRING)
        self._periods: dict[int, tuple[int, float]] = {}
        """Step and duration (s) of the last pause, by period in steps."""

    def observe(self, step: int, seconds: float) -> Kind:
        """Judge a step that was slow outside every named phase; `step` must increase from call to
        call."""
        if self._expected(step, seconds) or self._learned(step, seconds):
            return "periodic"
        self._seen.append((step, seconds))
        self._unexplained.append(step)
        full = len(self._unexplained) == _RECURRING
        return "recurring" if full and step - self._unexplained[0] < _WITHIN_STEPS else "isolated"

    def _expected(self, step: int, seconds: float) -> bool:
        for period, (last, length) in self._periods.items():
            times = round((step - last) / period)
            on_time = abs(step - last - times * period) <= _slack(period)
            if 1 <= times <= _MAX_MISSED and on_time and _similar(seconds, length):
                self._periods[period] = (step, seconds)
                return True
        return False

    def _learned(self, step: int, seconds: float) -> bool:
        """Return whether this is a third pause at the same interval, which establishes a period."""
        alike = {earlier for earlier, length in self._seen if _similar(seconds, length)}
        for earlier in sorted(alike, reverse=True):
            gap = step - earlier
            slack = _slack(gap)
            if gap >= _MIN_PERIOD and any(abs(earlier - first - gap) <= slack for first in alike):
                if len(self._periods) >= _MAX_PERIODS:
                    oldest = min(self._periods, key=lambda period: self._periods[period][0])
                    del self._periods[oldest]
                self._periods[gap] = (step, seconds)
                return True
        return False


def _slack(period: int) -> int:
    return max(1, int(_TOLERANCE * period))


def _similar(one: float, other: float) -> bool:
    return max(one, other) <= _SIMILAR * min(one, other)
