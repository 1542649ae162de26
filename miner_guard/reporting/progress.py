"""Is the miner progressing? The answer of `/healthz`, from status.json and the settings of hang
detection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miner_guard.config import HangSettings
from miner_guard.detectors.verdict import SILENT_S, headline, shown, state_since
from miner_guard.system.clock import parse_iso_utc


def verdict_line(status: Mapping[str, Any] | None, age_s: float, *, in_full: bool) -> str:
    """The verdict in one line; `in_full` includes its cause."""
    verdict = shown(status, age_s)
    now = str((status or {}).get("updated") or "")
    return headline(verdict, now) if in_full else state_since(verdict, now)


def trouble(
    status: Mapping[str, Any] | None, age_s: float, now: float, hang: HangSettings
) -> str | None:
    """Why the miner is not progressing; None where it is. `now` is wall time."""
    if status is None:
        return "no status: no guard has run here yet"
    if age_s > SILENT_S:
        return f"the guard has written nothing for {age_s:.0f} s"
    if status.get("state") != "running":
        return f"the miner is {status.get('state')}"
    hung = status.get("hang")
    if isinstance(hung, Mapping) and hung.get("watching"):
        # Use the guard's own judgement: it knows how long an upload or an evaluation may take.
        return f"hang: {hung['hang']}" if hung.get("hang") else None
    steps = status.get("steps")
    age = steps.get("last_step_age_s") if isinstance(steps, Mapping) else None
    if isinstance(age, (int, float)):
        longest = steps.get("max_s") if isinstance(steps, Mapping) else None
        limit = max(hang.min_s, hang.factor * longest if isinstance(longest, (int, float)) else 0.0)
        since = age + age_s
        return f"no step for {since:.0f} s (limit {limit:.0f} s)" if since > limit else None
    return _before_the_first_step(status, now, hang)


def _before_the_first_step(status: Mapping[str, Any], now: float, hang: HangSettings) -> str | None:
    try:
        waited = now - parse_iso_utc(str(status.get("started")))
    except ValueError:
        return "the miner's start is unknown"
    if waited > hang.first_step_s:
        return f"no first step within {waited:.0f} s (limit {hang.first_step_s:.0f} s)"
    return None
