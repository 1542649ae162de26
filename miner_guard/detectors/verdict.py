"""Decides from the guard's state whether the miner is earning; the worst condition determines the
verdict. Pure.

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
    or_unknown,
)
from miner_guard.detectors.verdict_memory import Memory
from miner_guard.eventlog.status_document import NO_REPO, StatusDocument, VerdictStatus


@dataclass(frozen=True)
class RunVerdict:
    """The verdict: the first thing that an on-call engineer needs."""

    state: str
    """One of `STATES`."""

    cause: str
    """One sentence without a full stop: the problem, with the value seen."""

    next_step: str
    """The action to take; empty if none is needed."""

    event: str | None
    """The event whose row in the runbook applies, or None."""

    confidence: str
    """`measured`, `likely` (inferred from related evidence) or `unknown`."""

    key: str
    """Stable name of the condition; the numbers in the sentence change, the key does not."""

    earns: str
    """Whether the miner is earning: `yes`, `probably`, `no` or `unknown`."""

    def status(self, since: str | None = None) -> VerdictStatus:
        """The verdict as run.db stores it; `since` is UTC, ISO 8601."""
        return VerdictStatus(**asdict(self), since=since)


def judge(status: StatusDocument, memory: Memory) -> RunVerdict:
    """The verdict on this status document; unknown if nothing shows whether the miner is
    earning."""
    memory.watch(status.steps)
    for condition in CONDITIONS:
        cause = condition.cause(status, memory) or memory.reported.get(condition.event or "")
        if cause:
            earns = "unknown" if condition.state == UNKNOWN else "no"
            if condition.state == DEGRADED:
                earns, evidence = _evidence(status)
                cause = f"{cause}; {evidence}"
            return RunVerdict(
                condition.state,
                cause,
                condition.action(status, memory),
                condition.event,
                condition.confidence,
                condition.key,
                earns,
            )
    return _healthy(status)


def _healthy(status: StatusDocument) -> RunVerdict:
    """The verdict if no condition holds: earning after an accepted audit, or likely after a
    verified upload."""
    earns, evidence = _evidence(status)
    cause = _progress(status)
    if earns == "yes":
        return RunVerdict(EARNING, cause, "", None, "measured", "audited", earns)
    cause = f"{cause}; {evidence}"
    if earns == "probably":
        return RunVerdict(EARNING, cause, "", None, "likely", "uploaded", earns)
    repo = status.uploads.repo
    if repo.reason == NO_REPO:
        step = "set [repo] in guard.toml; `miner-guard config --changed` shows it"
    elif repo.revision is None:
        step = "wait for the first upload; `miner-guard top` shows what it is waiting for"
    else:
        step = "check the published files: `miner-guard audit`"
    return RunVerdict(UNKNOWN, cause, step, None, "unknown", "not_audited", earns)


def _evidence(status: StatusDocument) -> tuple[str, str]:
    """Return whether validators accept the published files (see `RunVerdict.earns`), and how the
    guard knows."""
    audit, upload, repo = status.uploads.audit, status.uploads.upload, status.uploads.repo
    if audit is not None and audit.outcome == "accepted":
        return "yes", "the last audit accepted the published files"
    if upload is not None and upload.outcome == "verified" and repo.stale is False:
        return "probably", "the last upload was verified, but no audit has checked it yet"
    why = repo.reason or "nothing has been uploaded yet"
    return "unknown", f"it is unknown whether validators accept the published files: {why}"


def _progress(status: StatusDocument) -> str:
    steps = status.steps
    loss = steps.loss
    words = f"training at outer step {or_unknown(steps.outer_step)}, inner step "
    words += or_unknown(steps.inner_step)
    return words + (f", loss {loss:.2f}" if isinstance(loss, (int, float)) else "")
