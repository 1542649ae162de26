"""The latest incident as one object: what happened, where, what it cost, what the guard did and
what it saved as evidence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miner_guard.record.redaction import public, public_around
from miner_guard.record.store import RunReader, StoredEvent
from miner_guard.system.clock import iso_utc, parse_iso_utc

OPENS = ("hang_detected", "incident", "crash_loop", "loss_nan", "cpu_fallback", "gpu_fault")
"""Events that open an incident, unless they are at level info; the first of a chain."""

_TOLD = ("miner_started", "verdict_changed", "upload_succeeded", "upload_blocked")
"""In the timeline, although they are below warning."""

_GUARD = ("stack_dump", "miner_stopping", "miner_restarting", "crash_loop", "orphan_killed")
"""What the guard did about it."""

_CHAIN_S = 120.0
"""Openings this close together, with no step between, are one incident: a hang, then the exit."""

_MAX_EVENTS = 200
_MAX_LINES = 40
_MAX_TIMELINE = 20


@dataclass(frozen=True)
class IncidentCard:
    """One incident. Times are in seconds since 1970."""

    title: str
    event: str
    start: float
    """When training stopped or went wrong: for a hang, its first silent second."""

    noticed: float
    over: float | None
    """When training took its next step; None until then."""

    culprits: Sequence[int]
    frame: str | None
    """Where the culprit's code stood, such as `loops.py:14`."""

    collective: str | None
    """Which collectives the ranks are in, with their numbers."""

    fix: str | None
    uploads_late: int
    """Uploads that failed or were blocked in the meantime."""

    guard: Sequence[str]
    stack: str | None
    """The culprit's stack, as far as it may leave the machine."""

    timeline: Sequence[Mapping[str, Any]]
    """The `time`, `event` and `text` of what happened meanwhile."""

    before: int
    """Earlier incidents of this kind in the record."""

    @property
    def sentence(self) -> str:
        """The card that people post: `HANG DETECTED: …. Noticed after 45 s, training again after
        52 s, 2 uploads late.`"""
        ranks = "" if self.collective is None else f"; {self.collective}"
        return f"{self.title}{ranks}. {self.cost.capitalize()}."

    @property
    def cost(self) -> str:
        """What it cost, such as `noticed after 45 s, training again after 52 s, 2 uploads late`."""
        words = [f"noticed after {self.noticed - self.start:.0f} s"]
        if self.over is not None:
            words.append(f"training again after {self.over - self.start:.0f} s")
        if self.uploads_late:
            words.append(f"{self.uploads_late} upload{'s'[: self.uploads_late != 1]} late")
        return ", ".join(words)


_NO_CAUSE = re.compile(r"^(.*?: ).*matches no known fault\..*? Seen: ")


def subject(headline: str) -> str:
    """The first line of an opening event, without what follows the cause; where no cause is known,
    what was seen."""
    line = _NO_CAUSE.sub(r"\1", headline.partition("\n")[0].partition(" Fix: ")[0])
    return line.partition(" Seen: ")[0].rstrip(".")


def latest(record: RunReader, since: str = "") -> IncidentCard | None:
    """The incident that opened last; None if the record has none since this time."""
    openings = record.events(
        OPENS, min_level="warning", since=since, limit=_MAX_EVENTS, newest=True
    )
    if not openings:
        return None
    place = len(openings) - 1
    while place and _one(record, openings[place - 1], openings[place]):
        place -= 1
    opened = openings[place]
    noticed = parse_iso_utc(opened.ts)
    start = noticed - float(opened.fields.get("idle_s") or 0.0)
    over = _next_step(record, opened)
    until = "" if over is None else iso_utc(over + 1.0)
    since = iso_utc(start - 60.0)
    told = record.notable((*_GUARD, *_TOLD), "warning", since=since, limit=_MAX_EVENTS)
    around = [event for event in told if not until or event.ts <= until]
    dumps = [event for event in around if event.name == "stack_dump" and event.level != "info"]
    fields = opened.fields
    culprits = list(fields.get("culprits") or ([] if opened.rank is None else [opened.rank]))
    frames = fields.get("frames") or {}

    def line_of(event: StoredEvent) -> str:
        """The event's line without the fix, which the card has once."""
        return public_around(str(record.path.parent), subject(event.headline))

    lost = [e for e in around if e.name in ("upload_failed", "upload_blocked")]
    return IncidentCard(
        title=public(subject(opened.headline)).removeprefix("INCIDENT "),
        event=opened.name,
        start=start,
        noticed=noticed,
        over=over,
        culprits=culprits,
        frame=next((str(frames[str(r)]) for r in culprits if str(r) in frames), None),
        collective=_collective(dumps),
        fix=next((str(e.fields["fix"]) for e in around if e.fields.get("fix")), None),
        uploads_late=sum(e.level != "info" for e in lost),
        guard=[line_of(e) for e in around if e.name in _GUARD],
        stack=_stack(dumps, culprits),
        timeline=[
            {"time": parse_iso_utc(e.ts), "event": e.name, "text": line_of(e)}
            for e in around[-_MAX_TIMELINE:]
        ],
        before=sum(event.name == opened.name for event in openings[:place]),
    )


def _one(record: RunReader, earlier: StoredEvent, later: StoredEvent) -> bool:
    """Whether two openings belong to one incident."""
    if parse_iso_utc(later.ts) - parse_iso_utc(earlier.ts) > _CHAIN_S:
        return False
    step = _next_step(record, earlier)
    return step is None or step > parse_iso_utc(later.ts)


def _next_step(record: RunReader, after: StoredEvent) -> float | None:
    """When training went on; after a NaN, with the first finite loss."""
    limit = _MAX_EVENTS if after.name == "loss_nan" else 1
    for step in record.events(["inner_step"], after=after.id, limit=limit):
        if after.name != "loss_nan" or isinstance(step.fields.get("loss"), (int, float)):
            return parse_iso_utc(step.ts)
    return None


def _collective(dumps: Sequence[StoredEvent]) -> str | None:
    """`rank 1 is at collective 1060, rank 0 waits in 1061`, from the end of the line."""
    details = [event.headline.partition("; ")[2] for event in dumps]
    return next((public(detail) for detail in details if "collective" in detail), None)


def _stack(dumps: Sequence[StoredEvent], culprits: Sequence[Any]) -> str | None:
    for event in dumps:
        folder = Path(str(event.fields.get("path")))
        for rank in culprits:
            for file in sorted(folder.glob(f"*rank-{rank:04d}*.txt")):
                try:
                    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
                except OSError:
                    continue
                return "\n".join(public(line) for line in lines[:_MAX_LINES])
    return None
