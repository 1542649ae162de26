"""Goodput: the wall time of a run by category (the categories follow ml-goodput-measurement).

Each second belongs to exactly one category. Inside a step, the phases decide. The time from the
launch to the first step is `init` (`restart` from the second launch on); a stretch without steps is
`hang` if a hang was found in it. Once the time since the last step exceeds any plausible duration
of a step, all of it counts as `hang`: goodput must not rise before the guard detects a hang. If the
step finishes after all, its time is split by its phases instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

CATEGORIES = (
    "training",
    "data",
    "upload",
    "allreduce",
    "load_state",
    "pause",
    "monitoring",
    "hang",
    "restart",
    "init",
)

_PHASES = ("data", "upload", "allreduce", "load_state", "pause")
_RECENT_STEPS = 64
_EXPECTED_FACTOR = 2.0
"""An unfinished step counts as training up to this multiple of the longest recent step."""

_EVALUATION = ("inference", "val_loss", "example_loss")


class Goodput:
    """Adds up one rank's wall time by category, in seconds. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)
        self._accounted: float | None = None
        self._launches = 0
        self._stepped = False
        self._hung = False
        self._finished = False
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)

    def launched(self, now: float) -> None:
        """Record that the miner was started; the time since the last step was lost to the
        restart."""
        if self._accounted is None:
            self._accounted = now
        else:
            self._spend("restart", now)
        self._launches += 1
        self._stepped = self._hung = self._finished = False

    def step(
        self, start: float, end: float, phases: Mapping[str, float], nested_in_monitor_s: float
    ) -> None:
        """Record one finished step."""
        if self._accounted is None:
            self._accounted = start
        if not self._stepped:
            self._spend("init" if self._launches <= 1 else "restart", start)
            self._stepped = True
        if self._hung:
            # The hang cleared without a restart.
            self._spend("hang", start)
            self._hung = False
        length = end - self._accounted
        if length <= 0:
            return
        self._recent.append(length)
        for name, seconds in split(length, phases, nested_in_monitor_s).items():
            self.seconds[name] += seconds
        self._accounted = end

    def hang_found(self) -> None:
        """Count the time since the last step as a hang."""
        self._hung = True

    def exited(self, now: float, *, finished: bool) -> None:
        """Record that the miner exited. If it had not finished, the time since its last step is
        lost."""
        self._finished = finished
        if self._accounted is not None and not finished:
            self._spend("hang" if self._hung else "restart", now)

    def shares(self, now: float, phase: str = "") -> dict[str, float]:
        """Share of wall time by category up to `now`; `phase` is the rank's current phase. Empty
        before the launch."""
        if self._accounted is None:
            return {}
        totals = dict(self.seconds)
        if not self._finished:
            open_s = max(0.0, now - self._accounted)
            totals[self._category(phase, open_s)] += open_s
        whole = sum(totals.values())
        return {name: seconds / whole for name, seconds in totals.items()} if whole > 0 else {}

    def _category(self, phase: str, open_s: float) -> str:
        if self._hung:
            return "hang"
        if not self._stepped:
            return "init" if self._launches <= 1 else "restart"
        if phase in _PHASES:
            return phase
        if phase == "monitor" or phase in _EVALUATION:
            return "monitoring"
        overdue = self._recent and open_s > _EXPECTED_FACTOR * max(self._recent)
        return "hang" if overdue else "training"

    def _spend(self, category: str, until: float) -> None:
        assert self._accounted is not None
        if until > self._accounted:
            self.seconds[category] += until - self._accounted
            self._accounted = until


def split(
    length: float, phases: Mapping[str, float], nested_in_monitor_s: float
) -> dict[str, float]:
    """Seconds that a step spent in each category; time outside all phases counts as training.
    Overlapping phases are scaled down to fit."""
    parts = {name: phases[name] for name in _PHASES if phases.get(name, 0.0) > 0}
    evaluation = sum(phases.get(name, 0.0) for name in _EVALUATION)
    monitoring = phases.get("monitor", 0.0) + max(0.0, evaluation - nested_in_monitor_s)
    if monitoring > 0:
        parts["monitoring"] = monitoring
    claimed = sum(parts.values())
    if claimed > length:
        parts = {name: seconds * length / claimed for name, seconds in parts.items()}
    parts["training"] = max(0.0, length - claimed)
    return parts
