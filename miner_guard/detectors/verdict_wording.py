"""The verdict in words, as shown by pages, commands, alerts and endpoints. Pure.

All of them take the text from here, so that they agree word for word.
"""

from __future__ import annotations

import contextlib
import math

from miner_guard.detectors.verdict_conditions import DEGRADED, UNKNOWN
from miner_guard.detectors.verdict_history import Strip, VerdictWeek
from miner_guard.eventlog.status_document import StatusDocument, VerdictStatus
from miner_guard.record.words import percentages
from miner_guard.system.clock import iso_utc, parse_iso_utc

SILENT_S = 60.0
"""If the status is older than this, the guard is gone or wedged, because it writes once a
second."""

FIND_THE_GUARD = (
    "on the miner's machine, check whether the guard is running: `miner-guard status`, `pm2 "
    "status` or `systemctl status miner-guard`"
)
"""The next step if the guard itself is silent."""

_DEGRADED = {"yes": "STILL EARNING, degraded", "probably": "PROBABLY STILL EARNING, degraded"}
"""By `VerdictStatus.earns`: the headline's first words for a degraded miner. Whether it is earning
comes first, since that decides whether someone has to get up at night."""

_ENDED = {"crash_loop": "stopped by a crash loop", "finished": "finished"}
"""For each verdict key, the state to show for a miner whose guard has ended."""


def is_silent(status: StatusDocument, age_s: float) -> bool:
    """Return whether this status is too old for a guard that should still be running."""
    return age_s > SILENT_S and status.state != "done"


def shown(status: StatusDocument | None, age_s: float) -> VerdictStatus:
    """The verdict to show for a status document that the guard wrote `age_s` seconds ago: the last
    verdict of a guard that has fallen silent no longer counts."""
    if status is None or status == StatusDocument():
        return VerdictStatus(
            state=UNKNOWN,
            cause="no guard has run here yet",
            next_step="start it: `miner-guard run -- CMD`",
            event="guard_started",
            confidence="unknown",
            earns="unknown",
        )
    known = status.verdict or VerdictStatus(state=UNKNOWN, cause="the guard has no verdict yet")
    if not is_silent(status, age_s):
        return known
    return VerdictStatus(
        state=UNKNOWN,
        since=status.updated,
        cause=f"the guard has written nothing for {span(age_s)}; its last verdict was "
        f"{known.state}",
        next_step=_find_the_guard(status),
        event="guard_stopped",
        confidence="measured",
        key="guard_silent",
        earns="unknown",
        week=known.week,
        week_start=known.week_start,
    )


def _find_the_guard(status: StatusDocument) -> str:
    """`FIND_THE_GUARD`, plus the host and the start command if the guard has recorded them."""
    step = FIND_THE_GUARD
    if status.host:
        step = step.replace("the miner's machine", f"host {status.host}")
    if status.start_command:
        step += f"; start it: `{status.start_command}`"
    return step


def miner_state(status: StatusDocument, age_s: float) -> str:
    """The miner's state, such as `running`; `unknown (…)` if the guard is silent, since its last
    state may be outdated."""
    state = status.state or "unknown"
    if state == "done":
        return _ENDED.get((status.verdict and status.verdict.key) or "", "stopped")
    if not is_silent(status, age_s):
        return state
    return f"unknown ({state} when the guard last wrote, {span(age_s)} ago)"


def now_of(status: StatusDocument, age_s: float) -> float | None:
    """The reader's current time, in seconds since 1970: `age_s` after the guard wrote the status;
    None if the status contains no valid time."""
    with contextlib.suppress(ValueError):
        if status.updated is not None and math.isfinite(age_s):
            return parse_iso_utc(status.updated) + age_s
    return None


def time_of_reading(status: StatusDocument, age_s: float) -> str:
    """`now_of` as UTC, ISO 8601; empty if unknown."""
    now = now_of(status, age_s)
    return "" if now is None else iso_utc(now)


def week_of(status: StatusDocument, age_s: float, cells: int) -> Strip | None:
    """Verdicts from the last seven days at most; None if no guard has recorded any."""
    now, verdict = now_of(status, age_s), status.verdict
    if now is None or verdict is None or not verdict.week:
        return None
    ended = is_silent(status, age_s) or (status.state == "done" and age_s > SILENT_S)
    current = None if ended else verdict.state
    return VerdictWeek(verdict.week, verdict.week_start).strip(now, cells, current)


def share_words(strip: Strip) -> str:
    """`last 4.6 h: earning 93%, not earning 7%`: the strip as text, for screen readers and
    consoles."""
    shares = percentages(strip.shares)
    words = ", ".join(f"{state} {share}" for state, share in shares.items())
    return f"last {span(strip.end - strip.since)}: {words}"


def span(seconds: float) -> str:
    """A length of time in its largest unit: `40 s`, `15 min`, `4.6 h`, `7 days`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    if seconds < 172_800:
        return f"{seconds / 3600:.1f}".removesuffix(".0") + " h"
    return f"{seconds / 86_400:.1f}".removesuffix(".0") + " days"


def advice(verdict: VerdictStatus) -> str:
    """The next step, and the command that explains it; empty if there is nothing to do."""
    if not verdict.next_step:
        return ""
    more = f" (more: `miner-guard runbook {verdict.event}`)" if verdict.event else ""
    return f"{verdict.next_step}{more}"


def headline(verdict: VerdictStatus | None, now: str = "") -> str:
    """`NOT EARNING since 12:03 UTC: rank 2 in data for 912s; restarting, attempt 2 of 5`, or
    `STILL EARNING, degraded since 12:03 UTC: …`.

    `verdict` is the status document's; None if the guard wrote none. `now`: see `state_since`.
    """
    if not verdict:
        return "UNKNOWN: the guard has no verdict yet"
    return f"{state_since(verdict, now)}: {verdict.cause}"


def state_since(verdict: VerdictStatus, now: str = "") -> str:
    """`NOT EARNING since 12:03 UTC`, without the cause. `now`: the time of reading, ISO 8601; if
    the verdict began on another day, the date is included."""
    since = str(verdict.since or "")
    day = f"{since[:10]} " if now and now[:10] != since[:10] else ""
    when = f" since {day}{since[11:16]} UTC" if len(since) >= 16 else ""
    return f"{state_words(verdict)}{when}"


def state_words(verdict: VerdictStatus) -> str:
    """The headline's first words: whether the miner is earning."""
    if verdict.state == DEGRADED and verdict.earns is not None:
        return _DEGRADED.get(verdict.earns, "EARNING UNKNOWN, degraded")
    return str(verdict.state).upper()
