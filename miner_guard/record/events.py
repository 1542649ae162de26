"""The vocabulary of the log: an event has a name, a level, a sentence for people and fields.

Standard library only. The sentence is written where the fact is known; operators grep for it, so
its wording is a contract. `ops/runbook.md` explains every name, and a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from miner_guard.record.words import counted
from miner_guard.state_dir import is_full

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}

RESERVED = frozenset({"ts", "level", "event", "msg", "run_id", "host", "rank"})
"""Keys that every line of guard.jsonl has; no field of an event may use them."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MAX_TEXT = 16_384


@dataclass(frozen=True)
class Event:
    """An event to which the log has yet to add the time, run and host."""

    name: str
    level: str
    text: str
    """The console line without emoji, time or level."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Measured values, with units in the names; None if unknown."""

    rank: int | None = None

    def at(self, level: str) -> Event:
        """The same event at a different level."""
        return replace(self, level=level)

    def to_json(self) -> dict[str, Any]:
        """The form in which one process sends an event to another."""
        return {
            "event": self.name,
            "level": self.level,
            "text": self.text,
            "rank": self.rank,
            "fields": dict(self.fields),
        }

    @staticmethod
    def from_json(document: Mapping[str, Any], rank: int | None = None) -> Event | None:
        """Parse `to_json`'s document; None if it does not describe an event.

        `rank` is the sender's rank, used if the document names none.
        """
        name, level, text = (document.get(key) for key in ("event", "level", "text"))
        fields, sender = document.get("fields"), document.get("rank", rank)
        if not (isinstance(name, str) and isinstance(level, str) and isinstance(text, str)):
            return None
        if not _NAME.fullmatch(name) or level not in LEVELS:
            return None
        if not isinstance(fields, dict) or RESERVED & fields.keys():
            return None
        return Event(name, level, text[:_MAX_TEXT], fields, _rank(sender, rank))


def _rank(sender: Any, fallback: int | None) -> int | None:
    return sender if isinstance(sender, int) and not isinstance(sender, bool) else fallback


def event(name: str, level: str, text: str, /, *, rank: int | None = None, **fields: Any) -> Event:
    """Create an event. Raises ValueError for an unknown level or a reserved field, which are bugs
    of the caller."""
    if level not in LEVELS:
        raise ValueError(f"event {name} has level {level!r}; the levels are {', '.join(LEVELS)}")
    if taken := RESERVED & fields.keys():
        raise ValueError(f"event {name} uses reserved fields: {', '.join(sorted(taken))}")
    return Event(name, level, text, fields, rank)


def degraded(what: str, **fields: Any) -> Event:
    """The event for something of the guard's own that does not work as it should."""
    return event("guard_degraded", "warning", f"GUARD DEGRADED: {what}", what=what, **fields)


def recovered(what: str, **fields: Any) -> Event:
    """The event for something of the guard's own that works again."""
    return event("guard_degraded", "info", f"GUARD RECOVERED: {what}", what=what, **fields)


PHASES = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "inference",
    "val_loss",
    "example_loss",
    "upload",
    "allreduce",
    "load_state",
    "pause",
    "monitor",
    "collective",
    "other",
)
"""Phases with their own column in a step record; the column `other` sums all others."""

SPECIAL_PHASES = ("inference", "val_loss", "upload", "allreduce", "load_state", "pause")
"""Detectors compare a step that contains one of these phases with similar steps, not with plain
training steps."""


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
            file=what,
        )
    return degraded(f"{what} cannot be written: {reason}{then}", file=what)


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
        self._full: bool | None = None
        """Whether the disk was full when the last write failed; None if it succeeded."""

    def failed(self, error: OSError) -> Event | None:
        """Record a failed write; returns an event if it began an outage."""
        first, self._full = self._full is None, is_full(error)
        return write_failed(self._what, error, self._then) if first else None

    def succeeded(self, lost: int = 0) -> Event | None:
        """Record a successful write; returns an event if it ended an outage that cost `lost`
        lines."""
        if self._full is None:
            return None
        full, self._full = self._full, None
        text = f"DISK RECOVERED: writing {self._what} again, {counted(lost, 'line')} lost"
        if full:
            return event("disk_full", "info", text, what=self._what, lost=lost)
        return event("guard_degraded", "info", text, what=self._what, lost=lost)
