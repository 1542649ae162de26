"""Clocks that callers pass to detectors and timers, which never call `time` themselves, and limits
on how often something is reported.

Standard library only, so that ranks can use it too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from datetime import datetime, timezone
from types import BuiltinFunctionType
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock and a wall clock. Deadlines and durations use `monotonic`; only timestamps
    use `wall`."""

    def monotonic(self) -> float:
        """Seconds since a fixed point that all processes on this host share; never steps."""
        ...

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC according to this host's clock, which may step."""
        ...


class SystemClock:
    """The host's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class FakeClock:
    """A clock for tests and simulations that moves only when `advance` is called."""

    def __init__(self, monotonic: float = 1000.0, wall: float = 1_767_323_045.0) -> None:
        self._monotonic = monotonic
        self._wall = wall

    def monotonic(self) -> float:
        return self._monotonic

    def wall(self) -> float:
        return self._wall

    def advance(self, seconds: float) -> None:
        """Advance both clocks by `seconds`."""
        self._monotonic += seconds
        self._wall += seconds

    def step_wall(self, seconds: float) -> None:
        """Step only the wall clock, as NTP or an operator would."""
        self._wall += seconds


def without_reentry(clock: Callable[[], float]) -> Callable[[], float]:
    """`clock`, or if it is the program's own, one that a call from within itself gets the last
    value of: a clock that calls the hook would otherwise call itself without end."""
    if isinstance(clock, BuiltinFunctionType):
        return clock
    state = threading.local()

    def read() -> float:
        if not getattr(state, "reading", False):
            state.reading = True
            try:
                state.last = clock()
            finally:
                state.reading = False
        return getattr(state, "last", 0.0)

    return read


def iso_utc(wall: float) -> str:
    """Format a wall time as `2026-01-02T03:04:05.678901Z`."""
    return datetime.fromtimestamp(wall, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_iso_utc(text: str) -> float:
    """Parse a time formatted by `iso_utc`. Raises ValueError."""
    if text[-1:] != "Z":
        raise ValueError(f"{text!r} is not a UTC time such as 2026-01-02T03:04:05.678901Z")
    # Twenty times as fast as strptime; a report parses a million timestamps.
    return datetime.fromisoformat(text[:-1]).replace(tzinfo=timezone.utc).timestamp()


class Once:
    """Lets the first report on each subject through, and the next one only after `clear`."""

    def __init__(self, max_subjects: int | None = None) -> None:
        """`max_subjects`: maximum number of subjects to let through; None: no limit."""
        self._reported: set[Hashable] = set()
        self._max = max_subjects

    def first(self, subject: Hashable = None) -> bool:
        """Return True if `subject` should be reported now."""
        full = self._max is not None and len(self._reported) >= self._max
        if subject in self._reported or full:
            return False
        self._reported.add(subject)
        return True

    def clear(self, subject: Hashable = None) -> bool:
        """Let `subject` through again. Returns whether it had been reported."""
        reported = subject in self._reported
        self._reported.discard(subject)
        return reported

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._reported)


class OncePer:
    """Lets a report through when its content has changed, and a repeat once every `every_s`
    seconds."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last: tuple[object, float] | None = None
        self.left_out = 0
        """Number of reports that `ask` has refused since the last call to `take_left_out`."""

    def ask(self, now: float, content: object = None) -> bool:
        """Return True if `content` should be reported at `now` (seconds)."""
        if self._last is not None:
            last, at = self._last
            if last == content and now - at < self._every_s:
                self.left_out += 1
                return False
        self._last = (content, now)
        return True

    def take_left_out(self) -> int:
        """Return the number of refused reports, and reset it to 0."""
        count, self.left_out = self.left_out, 0
        return count

    def clear(self) -> None:
        """Let the next report through."""
        self._last = None
