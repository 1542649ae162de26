"""Decides whether the miner is making progress, for `/healthz`, from its state and the
settings of hang detection."""

from __future__ import annotations

from miner_guard.config import HangSettings
from miner_guard.eventlog.status_document import StatusDocument
from miner_guard.system.clock import parse_iso_utc
from miner_guard.watch.state import SILENT_S, headline, shown, state_since, time_of_reading


def verdict_line(status: StatusDocument | None, age_s: float, *, in_full: bool) -> str:
    """The verdict in one line; `in_full` includes its cause."""
    verdict, now = shown(status, age_s), "" if status is None else time_of_reading(status, age_s)
    return headline(verdict, now) if in_full else state_since(verdict, now)


def problem(
    status: StatusDocument | None, age_s: float, now: float, hang: HangSettings
) -> str | None:
    """Return why the miner is not making progress; None if it is. `now` is wall time."""
    if status is None:
        return "no status: no guard has run here yet"
    if age_s > SILENT_S:
        return f"the guard has written nothing for {age_s:.0f} s"
    if status.state != "running":
        return f"the miner is {status.state}"
    if status.hang.watching:
        # Use the guard's own judgement: it knows how long an upload or an evaluation may take.
        return f"hang: {status.hang.hang}" if status.hang.hang else None
    if status.steps.last_step_age_s is not None:
        limit = max(hang.min_s, hang.factor * (status.steps.max_s or 0.0))
        since = status.steps.last_step_age_s + age_s
        return f"no step for {since:.0f} s (limit {limit:.0f} s)" if since > limit else None
    return _before_the_first_step(status, now, hang)


def _before_the_first_step(status: StatusDocument, now: float, hang: HangSettings) -> str | None:
    try:
        waited = now - parse_iso_utc(str(status.started))
    except ValueError:
        return "the miner's start time is unknown"
    if waited > hang.first_step_s:
        return f"no first step within {waited:.0f} s (limit {hang.first_step_s:.0f} s)"
    return None
