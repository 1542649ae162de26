"""The verdict in words: what pages, commands and alerts show. Pure."""

from __future__ import annotations

from miner_guard.detectors.verdict import UNKNOWN
from miner_guard.eventlog.status_document import StatusDocument, VerdictStatus

SILENT_S = 60.0
"""A status older than this means that the guard is gone or wedged: it writes once a second."""


def shown(status: StatusDocument | None, age_s: float) -> VerdictStatus:
    """The verdict to show for a status document that the guard wrote `age_s` seconds ago: what a
    guard that has fallen silent last knew is no verdict."""
    if status is None or status == StatusDocument():
        return VerdictStatus(
            state=UNKNOWN,
            cause="no guard has run here yet",
            next_step="start it: miner-guard run -- CMD",
            event="guard_started",
            confidence="unknown",
        )
    if age_s > SILENT_S and status.state != "done":
        last = (status.verdict and status.verdict.state) or "unknown"
        return VerdictStatus(
            state=UNKNOWN,
            since=status.updated,
            cause=f"the guard has written nothing for {_age(age_s)}; its last verdict was {last}",
            next_step="look for its process on that machine: pm2 status, or systemctl status",
            event="guard_stopped",
            confidence="measured",
        )
    return status.verdict or VerdictStatus(state=UNKNOWN, cause="the guard has not judged yet")


def _age(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def headline(verdict: VerdictStatus | None, now: str = "") -> str:
    """`NOT EARNING since 12:03 UTC: rank 1 hangs in allreduce; restarting, attempt 2 of 5`.

    `verdict` is the status document's; None where the guard wrote none. `now`: see `state_since`.
    """
    if not verdict:
        return "UNKNOWN: the guard has not judged yet"
    return f"{state_since(verdict, now)}: {verdict.cause}"


def state_since(verdict: VerdictStatus, now: str = "") -> str:
    """`NOT EARNING since 12:03 UTC`, without the cause. `now`: the ISO time of reading; where it is
    of another day, the date is named too."""
    since = str(verdict.since or "")
    day = f"{since[:10]} " if now and now[:10] != since[:10] else ""
    when = f" since {day}{since[11:16]} UTC" if len(since) >= 16 else ""
    return f"{str(verdict.state).upper()}{when}"
