"""Is the miner earning? One verdict from the guard's state, the worst condition first. Pure.

The verdict reads the status document (what status.json holds) and `Memory`, the few findings whose
effect lasts. `CONDITIONS` is the order of judgement: the first condition that holds is the verdict,
so a miner that restarts after a hang is not also "stale" or "slow".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from miner_guard.eventlog.catalog import Finding, message
from miner_guard.eventlog.status_document import StatusDocument, VerdictStatus

_LASTING = frozenset({"loss_nan", "audit_failed", "repo_stale", "cpu_fallback"})
_ENDED_BY = {
    "audit_passed": ("audit_failed",),
    "upload_succeeded": ("repo_stale",),
    "cpu_fallback": ("cpu_fallback",),
    "miner_started": ("loss_nan", "cpu_fallback"),
}
_QUIET_S = 20.0
_QUIET_FACTOR = 4.0
"""A step is overdue beyond `_QUIET_S` seconds and this multiple of the longest step so far; most
pauses of a healthy run are shorter."""

_STEPPING = frozenset({"", "data", "forward", "backward", "optimizer", "collective"})
"""Phases that a step passes through in about the usual time; any other may last minutes."""

EARNING, NOT_EARNING, DEGRADED, STOPPED, UNKNOWN = (
    "earning",
    "not earning",
    "degraded",
    "stopped",
    "unknown",
)
STATES = (STOPPED, NOT_EARNING, DEGRADED, UNKNOWN, EARNING)
"""Worst first."""


@dataclass(frozen=True)
class RunVerdict:
    """The verdict that a person on call needs first."""

    state: str
    """One of `STATES`."""

    cause: str
    """One sentence without a full stop: the problem, with the value seen."""

    next_step: str
    """The action to take; empty where none is needed."""

    event: str | None
    """The event whose runbook row helps; None without one."""

    confidence: str
    """`measured`, `likely` (inferred from something near it) or `unknown`."""

    key: str
    """Stable name of the condition; the numbers in the sentence change, the key does not."""

    def status(self, since: str | None = None) -> VerdictStatus:
        """As in status.json; `since` is UTC, ISO 8601."""
        return VerdictStatus(**asdict(self), since=since)


@dataclass
class Memory:
    """Findings that stay in effect until another finding clears them. Bounded."""

    restart: Mapping[str, Any] | None = None
    hang: str | None = None
    """The last hang, until the next step."""

    crash_loop: str | None = None
    refused: str | None = None
    gpu_faults: dict[str, str] = field(default_factory=dict)
    disks: dict[str, str] = field(default_factory=dict)
    straggler: str | None = None
    silent_s: float = 0.0
    """Seconds without a step before the last hang was found, until the next step."""

    reported: dict[str, str] = field(default_factory=dict)
    """By event: the words of a finding that the status document shows only up to a second later,
    so that an alert sent with it cannot contradict it."""

    def take(self, finding: Finding) -> None:
        """Update the memory from one finding."""
        fields = finding.fields
        for event in _ENDED_BY.get(finding.event, ()):
            self.reported.pop(event, None)
        if finding.event in _LASTING and fields.get("verdict", "certain") == "certain":
            self.reported[finding.event] = message(finding).partition("\n")[0]
        if finding.event == "miner_restarting":
            self.restart = fields
        elif finding.event == "hang_detected":
            self.hang = str(fields.get("detail"))
            self.silent_s = float(fields.get("idle_s") or 0.0)
        elif finding.event == "crash_loop":
            self.crash_loop = str(fields.get("detail"))
        elif finding.event == "straggler":
            self.straggler = f"rank {finding.rank} {fields.get('detail')}"
        elif finding.event == "straggler_cleared":
            self.straggler = None
        elif finding.event in ("gpu_fault", "gpu_recovered"):
            self._toggle(self.gpu_faults, f"GPU {fields.get('gpu')}", finding, "gpu_fault")
        elif finding.event in ("disk_full", "disk_stuck", "disk_recovered"):
            self._toggle(self.disks, str(fields.get("what")), finding, "disk_full", "disk_stuck")

    def stepped(self, loss: float | None) -> None:
        """Training has made a step: the cause that blocked stepping is over."""
        self.hang = self.restart = None
        self.silent_s = 0.0
        if loss is not None and math.isfinite(loss):
            self.reported.pop("loss_nan", None)

    @staticmethod
    def _toggle(table: dict[str, str], key: str, finding: Finding, *begins: str) -> None:
        if finding.event not in begins:
            table.pop(key, None)
        elif len(table) < 64:
            table[key] = str(finding.fields.get("reason") or finding.fields.get("what"))


@dataclass(frozen=True)
class Condition:
    """One condition that can decide the verdict."""

    key: str
    state: str
    cause: Callable[[StatusDocument, Memory], str | None]
    """Returns the cause where the condition holds, else None."""

    next_step: str
    event: str | None
    confidence: str = "measured"


def judge(status: StatusDocument, memory: Memory) -> RunVerdict:
    """The verdict on this status document; unknown where nothing shows whether the miner earns."""
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
    step = "set [repo] and run `miner-guard audit`" if repo.revision is None else ""
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
    words = f"training at outer step {_or(steps.outer_step)}, inner step "
    words += _or(steps.inner_step)
    return words + (f", loss {loss:.2f}" if isinstance(loss, (int, float)) else "")


def _or(value: Any) -> str:
    return "unknown" if value is None else str(value)


def _paused(status: StatusDocument, memory: Memory) -> str | None:
    return "an operator paused the miner" if status.state == "paused" else None


def _gave_up(status: StatusDocument, memory: Memory) -> str | None:
    return memory.crash_loop and f"crash loop: {memory.crash_loop}"


def _finished(status: StatusDocument, memory: Memory) -> str | None:
    last = status.last_exit
    if status.state != "done" or last is None or not last.finished:
        return None
    return "the miner finished its work"


def _done(status: StatusDocument, memory: Memory) -> str | None:
    return "the guard stopped the miner" if status.state == "done" else None


def _restarting(status: StatusDocument, memory: Memory) -> str | None:
    if memory.restart is None:
        return None
    attempt = f"attempt {memory.restart.get('attempt')} of {memory.restart.get('max_restarts')}"
    why = memory.hang or str(memory.restart.get("cause"))
    return f"{why}; restarting, {attempt}"


def _ending(status: StatusDocument, memory: Memory) -> str | None:
    if status.state in ("running", "starting", None):
        return None
    return f"the miner is {status.state}"


def _hanging(status: StatusDocument, memory: Memory) -> str | None:
    return status.hang.hang or memory.hang


def _loss_not_finite(status: StatusDocument, memory: Memory) -> str | None:
    steps = status.steps
    loss = steps.loss
    if loss not in ("NaN", "Infinity", "-Infinity"):
        return None
    return f"loss is {loss} at step {_or(steps.inner_step)}"


def _on_cpu(status: StatusDocument, memory: Memory) -> str | None:
    on_cpu = [r for r, seen in status.ranks.cpu_fallback.items() if seen.verdict == "certain"]
    return f"the model runs on the CPU on rank {', '.join(on_cpu)}" if on_cpu else None


def _unregistered(status: StatusDocument, memory: Memory) -> str | None:
    return "the hotkey is not registered" if status.chain.registered is False else None


def _rejected(status: StatusDocument, memory: Memory) -> str | None:
    audit = status.uploads.audit
    if audit is None or audit.outcome != "rejected":
        return None
    return f"validators would reject what is published: {audit.detail}"


def _stale(status: StatusDocument, memory: Memory) -> str | None:
    repo = status.uploads.repo
    if not repo.stale:
        return None
    age, limit = _or(repo.age_s), _or(repo.limit_s)
    return f"the published gradients are {age} s old (limit {limit} s)"


def _no_step(status: StatusDocument, memory: Memory) -> str | None:
    if status.steps.total_steps is not None:
        return None
    return "the miner starts" if status.state == "starting" else "no step seen yet"


def _overdue(status: StatusDocument, memory: Memory) -> str | None:
    """A step takes far longer than any before it, and the guard has not called it a hang yet."""
    steps, hang = status.steps, status.hang
    age, longest = steps.last_step_age_s, steps.max_s
    if age is None or longest is None or steps.phase not in _STEPPING:
        return None
    if status.state != "running" or age < max(_QUIET_S, _QUIET_FACTOR * longest):
        return None
    limit = hang.limit_s
    until = f"; counted as a hang from {limit:.0f} s on" if limit is not None else ""
    return f"no step for {age:.0f} s (the longest took {longest:.1f} s){until}"


def _gpu_fault(status: StatusDocument, memory: Memory) -> str | None:
    faults = [f"{gpu} {what}" for gpu, what in sorted(memory.gpu_faults.items())]
    return "; ".join(faults) or None


def _disk(status: StatusDocument, memory: Memory) -> str | None:
    rows = [f"{what} cannot be written ({reason})" for what, reason in sorted(memory.disks.items())]
    return "; ".join(rows) or None


def _straggling(status: StatusDocument, memory: Memory) -> str | None:
    return memory.straggler


def _slow(status: StatusDocument, memory: Memory) -> str | None:
    steps = status.steps
    p50 = steps.p50_s
    return f"steps take {p50:.1f} s" if steps.grade == "bad" and p50 is not None else None


def _due_but_blocked(status: StatusDocument, memory: Memory) -> str | None:
    decision, repo = status.uploads.decision, status.uploads.repo
    if decision is None or decision.allowed is not False or not repo.due:
        return None
    return f"the gate blocks an upload that is due: {decision.reason}"


def _over_budget(status: StatusDocument, memory: Memory) -> str | None:
    costs = status.costs
    if costs.budget_status != "critical":
        return None
    return f"monitoring takes {costs.share_pct or 0.0:.1f}% of training time"


CONDITIONS: tuple[Condition, ...] = (
    Condition(
        "crash_loop",
        STOPPED,
        _gave_up,
        "fix the cause of the first failure, then start the guard again",
        "crash_loop",
    ),
    Condition("paused", STOPPED, _paused, "resume it: miner-guard ctl resume", "miner_paused"),
    Condition("finished", STOPPED, _finished, "", "miner_finished"),
    Condition(
        "done", STOPPED, _done, "start it again: pm2 start, or miner-guard run", "guard_stopped"
    ),
    Condition(
        "restarting",
        NOT_EARNING,
        _restarting,
        "nothing yet, the guard restarts it; the cause: miner-guard logs --event incident",
        "miner_restarting",
    ),
    Condition(
        "hang",
        NOT_EARNING,
        _hanging,
        "read the stacks of the named rank in incidents/",
        "hang_detected",
    ),
    Condition(
        "ending",
        NOT_EARNING,
        _ending,
        "wait; then miner-guard logs --level error -n 5 says why it ended",
        "miner_exited",
    ),
    Condition(
        "loss_nan",
        NOT_EARNING,
        _loss_not_finite,
        "stop the miner, restore the last good checkpoint, start it again",
        "loss_nan",
    ),
    Condition(
        "cpu_fallback",
        NOT_EARNING,
        _on_cpu,
        "stop the miner, check CUDA with miner-guard doctor, then start it again",
        "cpu_fallback",
    ),
    Condition(
        "unregistered",
        NOT_EARNING,
        _unregistered,
        "register the hotkey again, then miner-guard ctl restart",
        "chain_unregistered",
    ),
    Condition(
        "rejected",
        NOT_EARNING,
        _rejected,
        "fix what the audit names, then upload again: miner-guard audit",
        "audit_failed",
    ),
    Condition(
        "stale", NOT_EARNING, _stale, "find what blocks the upload: miner-guard gate", "repo_stale"
    ),
    Condition("no_step", UNKNOWN, _no_step, "wait for the first step", None, "unknown"),
    Condition(
        "overdue",
        DEGRADED,
        _overdue,
        "wait for the guard's judgement; miner-guard top shows the ranks",
        "hang_detected",
        "likely",
    ),
    Condition("gpu_fault", DEGRADED, _gpu_fault, "miner-guard doctor", "gpu_fault"),
    Condition(
        "disk", DEGRADED, _disk, "free space on the disk of the state directory", "disk_full"
    ),
    Condition(
        "due_but_blocked",
        DEGRADED,
        _due_but_blocked,
        "see each rule with its value and limit: miner-guard gate",
        "upload_blocked",
    ),
    Condition(
        "straggler",
        DEGRADED,
        _straggling,
        "check that rank's GPU clock, temperature and data path; its times: miner-guard top",
        "straggler",
    ),
    Condition("slow", DEGRADED, _slow, "check GPU use: miner-guard top", "slow_step"),
    Condition(
        "over_budget",
        DEGRADED,
        _over_budget,
        "see the most expensive operation: miner-guard costs",
        "monitoring_over_budget",
    ),
)
"""The order of judgement: conditions that stop earning before those that only slow it."""
