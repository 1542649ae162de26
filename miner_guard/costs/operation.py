"""Cost accounting for one operation, and the cap that brings the most expensive operations back
within the budget."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

_FADING = 0.9
_IMPACTS = ((10.0, "critical"), (5.0, "high"), (2.5, "moderate"), (0.25, "acceptable"))
"""Lower bounds as percentages of training time, with their labels, from source 000's cost table."""


@dataclass
class Operation:
    """The accumulated cost of one operation."""

    calls: int = 0
    blocking_s: float = 0.0
    """Seconds that the operation blocked training."""

    background_s: float = 0.0
    """CPU seconds spent alongside training."""

    longest_s: float = 0.0
    last_s: float = 0.0
    recent_s: float = 0.0
    """Expected duration of the next call: the longest recent blocking call, with less weight for
    older calls."""

    asked_s: float | None = None
    """The requested interval, in seconds."""

    last_done: float | None = None
    """Monotonic time of the last call."""

    last_step: int | None = None
    throttled: bool = False

    def add(self, seconds: float, *, blocking: bool, calls: int = 1) -> None:
        """Add `calls` calls that took `seconds` in total."""
        self.calls += calls
        self.last_s = seconds / calls
        self.longest_s = max(self.longest_s, self.last_s)
        if blocking:
            self.blocking_s += seconds
            self.recent_s = max(self.last_s, _FADING * self.recent_s)
        else:
            self.background_s += seconds

    def as_dict(self, training_s: float, running_s: float = 0.0) -> dict[str, Any]:
        """The operation's ledger row. `total_time` is blocking time only, `running_s` of an
        unfinished call included; background time is separate."""
        blocking_s = self.blocking_s + running_s
        share = percent(blocking_s, training_s)
        return {
            "total_time": round(blocking_s, 6),
            "background_time": round(self.background_s, 6),
            "calls": self.calls,
            "average_time": round((self.blocking_s + self.background_s) / self.calls, 6)
            if self.calls
            else None,
            "max_time": round(self.longest_s, 6),
            "last_time": round(self.last_s, 6),
            "percentage": round(share, 4),
            "blocking": blocking_s > 0 or self.background_s == 0,
            "impact": impact(share),
            "status": "throttled" if self.throttled else "active",
            "asked_interval_s": self.asked_s,
        }


def percent(seconds: float, training_s: float) -> float:
    """Convert `seconds` to a percentage of training time, at most 100 even if monitoring took
    longer than training."""
    if seconds <= 0:
        return 0.0
    return 100.0 if seconds >= training_s else 100 * seconds / training_s


def impact(share_pct: float) -> str:
    """Label a share of training time: `negligible`, `acceptable`, `moderate`, `high` or
    `critical`."""
    return next((word for limit, word in _IMPACTS if share_pct >= limit), "negligible")


def fair_cap(shares_pct: Collection[float], budget_pct: float) -> float:
    """Return the largest share per operation at which all operations together still fit the budget.

    Operations below the cap keep their share; the cap limits the most expensive ones:
    sum(min(share, cap)) = budget. Infinite if the operations already fit.
    """
    if sum(shares_pct) <= budget_pct:
        return float("inf")
    left = budget_pct
    ascending = sorted(shares_pct)
    for place, share in enumerate(ascending):
        cap = left / (len(ascending) - place)
        if share > cap:
            return cap
        left -= share
    return float("inf")
