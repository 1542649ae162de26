"""How long to wait before a helper process that ended is started again, and whether to report its
end."""

from __future__ import annotations

_FIRST_S = 1.0
_MAX_S = 60.0
_HEALTHY_S = 120.0
"""A process that lived so long ended for another reason than the one before it."""


class Backoff:
    """Doubles the wait from 1 s to 60 s while a process keeps ending soon after its start."""

    def __init__(self) -> None:
        self._wait_s = 0.0
        self.first = False
        """The latest end began a series: the one to report."""

    def ended(self, lived_s: float) -> float:
        """Seconds to wait, for a process that lived so long."""
        if lived_s >= _HEALTHY_S:
            self._wait_s = 0.0
        self.first = self._wait_s == 0.0
        self._wait_s = min(max(_FIRST_S, 2 * self._wait_s), _MAX_S)
        return self._wait_s
