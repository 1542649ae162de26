"""Is the miner earning? One verdict from the guard's state, the worst condition first. Pure.

`CONDITIONS` is the order of judgement: the first condition that holds is the verdict, so a miner
that restarts after a hang is not also "stale" or "slow".
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from miner_guard.detectors.verdict_conditions import (
    CONDITIONS,
    DEGRADED,
    EARNING,
    UNKNOWN,
    Memory,
    or_unknown,
)
from miner_guard.eventlog.status_document import NO_REPO, StatusDocument, VerdictStatus


@dataclass(frozen=True)
class RunVerdict:
    """The verdict that a person on call needs first."""

    state: str
    """One of `STATES`."""

    cause: str
    """One sentence without a full stop: the problem, with the value seen."""

    next_step: str
    """The action to take; empty if none is needed."""

    event: str | None
    """The event whose runbook row helps; None without one."""

    confidence: str
    """`measured`, `likely` (inferred from something near it) or `unknown`."""

    key: str
    """Stable name of the condition; the numbers in the sentence change, the key does not."""

    def status(self, since: str | None = None) -> VerdictStatus:
        """As in status.json; `since` is UTC, ISO 8601."""
        return VerdictStatus(**asdict(self), since=since)


def judge(status: StatusDocument, memory: Memory) -> RunVerdict:
    """The verdict on this status document; unknown if nothing shows whether the miner earns."""
    for condition in CONDITIONS:
        cause = condition.cause(status, memory) or memory.reported.get(condition.event or "")
        if cause:
            return RunVerdict(
                condition.state,
                f"{cause}; {_earns(status)}" if condition.state == DEGRADED else cause,
                condition.next_step,
                condition.event,
                condition.confidence,
                condition.key,
            )
    return _healthy(status)


def _healthy(status: StatusDocument) -> RunVerdict:
    """No condition holds: earning after an accepted audit, or likely after a verified upload."""
    audit, upload, repo = status.uploads.audit, status.uploads.upload, status.uploads.repo
    if audit is not None and audit.outcome == "accepted":
        return RunVerdict(EARNING, _progress(status), "", None, "measured", "audited")
    if upload is not None and upload.outcome == "verified" and repo.stale is False:
        cause = f"{_progress(status)}; the last upload was verified, no audit has judged it"
        return RunVerdict(EARNING, cause, "", None, "likely", "uploaded")
    why = repo.reason or "nothing has been uploaded yet"
    cause = f"{_progress(status)}; whether validators accept it is unknown: {why}"
    if repo.reason == NO_REPO:
        step = "set [repo] in guard.toml; miner-guard config --changed shows it"
    elif repo.revision is None:
        step = "wait for the first upload; what it waits for: miner-guard top"
    else:
        step = "check what is published: miner-guard audit"
    return RunVerdict(UNKNOWN, cause, step, None, "unknown", "not_audited")


def _earns(status: StatusDocument) -> str:
    """Whether a degraded miner still earns: the first question of the person on call."""
    return {
        "audited": "it still earns: the last audit accepted what is published",
        "uploaded": "it probably still earns: the last upload was verified",
    }.get(_healthy(status).key, "whether it still earns is unknown")


def _progress(status: StatusDocument) -> str:
    steps = status.steps
    loss = steps.loss
    words = f"training at outer step {or_unknown(steps.outer_step)}, inner step "
    words += or_unknown(steps.inner_step)
    return words + (f", loss {loss:.2f}" if isinstance(loss, (int, float)) else "")
