"""What the guard reports when it cannot write: a full disk and its end, each once."""

from __future__ import annotations

from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.state_dir import is_full


def write_failed(what: str, error: OSError, then: str = "") -> Finding:
    """`what` cannot be written, for lack of space, which may resolve by itself, or for another
    reason; `then`: the consequence."""
    reason = error.strerror or str(error)
    if is_full(error):
        return make_finding("disk_full", what=what, reason=reason)
    return make_finding("guard_degraded", what=f"{what} cannot be written: {reason}{then}")


def not_stored(what: str, error: OSError) -> Finding:
    """A single write of `what` failed; nothing tries again, so no recovery will follow."""
    text = f"{what} could not be stored: {error.strerror or error}"
    return make_finding("guard_degraded", what=text, disk_full=is_full(error))


class WriteOutage:
    """Reports the first failed write of one file and the first that succeeds after it."""

    def __init__(self, what: str, then: str = "") -> None:
        """`what` names the file; `then` is the consequence while it cannot be written."""
        self._what = what
        self._then = then
        self.ongoing = False
        self.lost = 0
        """Writes lost since the outage began."""

    def failed(self, error: OSError, lost: int = 1) -> Finding | None:
        """A write failed, and `lost` records with it."""
        first, self.ongoing = not self.ongoing, True
        self.lost += lost
        return write_failed(self._what, error, self._then) if first else None

    def succeeded(self) -> Finding | None:
        """A write succeeded."""
        if not self.ongoing:
            return None
        lost, self.lost, self.ongoing = self.lost, 0, False
        return make_finding("disk_recovered", what=self._what, lost=lost)
