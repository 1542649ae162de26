"""Events for failed writes. The guard reports an outage once when it begins and once when it
ends."""

from __future__ import annotations

from miner_guard.record.events import Event, degraded, event
from miner_guard.record.words import counted
from miner_guard.state_dir import is_full


def write_failed(what: str, error: OSError, then: str = "") -> Event:
    """Return the event that `what` cannot be written: `disk_full` if there is no space left,
    otherwise `guard_degraded`, followed by the consequence `then`."""
    reason = error.strerror or str(error)
    if is_full(error):
        return event(
            "disk_full",
            "critical",
            f"DISK FULL: cannot write {what} ({reason}); the miner keeps running",
            what=what,
            reason=reason,
        )
    return degraded(f"{what} cannot be written: {reason}{then}")


def not_stored(what: str, error: OSError) -> Event:
    """Return the event for a failed one-off write of `what`. The guard does not retry that write,
    so it cannot report a recovery either."""
    text = f"{what} could not be stored: {error.strerror or error}"
    return degraded(text, disk_full=is_full(error))


class WriteOutage:
    """Reports the first failed write of a file, and the first successful write after it."""

    def __init__(self, what: str, then: str = "") -> None:
        """`what` names the file; `then` is the consequence while it cannot be written."""
        self._what = what
        self._then = then
        self.ongoing = False
        self.lost = 0
        """Writes lost since the outage began."""

    def failed(self, error: OSError, lost: int = 1) -> Event | None:
        """Record a failed write that lost `lost` records; returns an event if it began an
        outage."""
        first, self.ongoing = not self.ongoing, True
        self.lost += lost
        return write_failed(self._what, error, self._then) if first else None

    def succeeded(self) -> Event | None:
        """Record a successful write; returns an event if it ended an outage."""
        if not self.ongoing:
            return None
        lost, self.lost, self.ongoing = self.lost, 0, False
        return event(
            "disk_recovered",
            "info",
            f"DISK RECOVERED: writing {self._what} again, {counted(lost, 'line')} lost",
            what=self._what,
            lost=lost,
        )
