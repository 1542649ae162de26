"""The uploads monitor's records of pushes, and the wording of its messages about them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.rank.journal import UploadEntry
from miner_guard.validators.facts import Published

VERIFY_AFTER_S = (0.0, 3.0, 10.0)
"""Seconds to wait before each check of a push: a mismatch must be seen twice, an unreadable repo
three times."""


@dataclass(frozen=True)
class Begun:
    """A push that has not been reported as complete yet."""

    entry: UploadEntry
    at: float | None
    before: Published


@dataclass(frozen=True)
class Push:
    """A reported push that awaits verification."""

    entry: UploadEntry
    began: float | None
    """Monotonic seconds; None if only the end was reported."""

    before: Published | None
    due: float
    checks: int = 0


def steps_of(entry: UploadEntry) -> tuple[int | None, int | None]:
    """Outer and inner step from the tag, else from the entry: a log's last step may be later than
    the pushed one."""
    match = re.search(r"(\d+)\.(\d+)$", entry.tag or "")
    return (int(match[1]), int(match[2])) if match else (entry.outer_step, entry.inner_step)


def took(entry: UploadEntry) -> str:
    """Describe how long the push took. A log shows only when a push ended, not how long it took."""
    seconds = entry.seconds
    return (
        "pushed, according to the miner's log" if seconds is None else f"pushed in {seconds:.1f}s"
    )


def tag_of(entry: UploadEntry) -> str | None:
    """The push's tag, else its outer and inner step; None if neither is known."""
    if entry.tag:
        return entry.tag
    if entry.outer_step is None or entry.inner_step is None:
        return None
    return f"{entry.outer_step}.{entry.inner_step}"


def not_verified(entry: UploadEntry, tag: str | None, why: str) -> Finding:
    """The finding for a push that only the miner has confirmed."""
    detail = f"{took(entry)}; not verified: {why}"
    return make_finding("upload_reported", tag=tag, detail=detail, source="guard")
