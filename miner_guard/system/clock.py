"""Clocks that callers pass to detectors and timers, which never call `time` themselves."""

from __future__ import annotations

import time
from datetime import datetime, timezone
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


def iso_utc(wall: float) -> str:
    """Format a wall time as `2026-01-02T03:04:05.678901Z`."""
    return datetime.fromtimestamp(wall, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_iso_utc(text: str) -> float:
    """Parse a time formatted by `iso_utc`. Raises ValueError."""
    if text[-1:] != "Z":
        raise ValueError(f"{text!r} is not a UTC time such as 2026-01-02T03:04:05.678901Z")
    # Twenty times as fast as strptime; a report parses a million timestamps.
    return datetime.fromisoformat(text[:-1]).replace(tzinfo=timezone.utc).timestamp()
