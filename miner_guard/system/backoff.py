"""Decides how long to wait before restarting a helper process that exited, and whether to report
the exit."""

from __future__ import annotations

_FIRST_S = 1.0
_MAX_S = 60.0
_HEALTHY_S = 120.0
"""A process that ran at least this long started properly, so its exit resets the wait."""


class Backoff:
    """Doubles the wait each time, from 1 s up to 60 s, while a process keeps exiting soon after
    starting."""

    def __init__(self) -> None:
        self._wait_s = 0.0
        self.first = False
        """Whether the latest exit is the first in a series of early exits. Only the first is
        reported."""

    def ended(self, lived_s: float) -> float:
        """Record the exit of a process that ran for `lived_s` seconds. Returns the number of
        seconds to wait before restarting it."""
        if lived_s >= _HEALTHY_S:
            self._wait_s = 0.0
        self.first = self._wait_s == 0.0
        self._wait_s = min(max(_FIRST_S, 2 * self._wait_s), _MAX_S)
        return self._wait_s
