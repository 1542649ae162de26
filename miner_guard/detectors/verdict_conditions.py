"""The conditions that decide the verdict, worst first, each with its next step. Pure.

A condition reads the status document (what status.json holds) and `Memory`, the few findings whose
effect lasts. Each next step names a command.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from miner_guard.eventlog.catalog import Finding, message
from miner_guard.eventlog.formatters import rank_list
from miner_guard.eventlog.status_document import StatusDocument

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
"""Phases that take about the usual time in every step; any other phase may last minutes."""

EARNING, NOT_EARNING, DEGRADED, STOPPED, UNKNOWN = (
    "earning",
    "not earning",
    "degraded",
    "stopped",
    "unknown",
)
STATES = (STOPPED, NOT_EARNING, DEGRADED, UNKNOWN, EARNING)
"""Worst first."""


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
        """Record that training made a step: whatever blocked it is over."""
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
    """Returns the cause if the condition holds, else None."""

    next_step: str
    event: str | None
    confidence: str = "measured"


def or_unknown(value: Any) -> str:
    """`unknown` for None."""
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
    return f"loss is {loss} at step {or_unknown(steps.inner_step)}"


def _on_cpu(status: StatusDocument, memory: Memory) -> str | None:
    on_cpu = [r for r, seen in status.ranks.cpu_fallback.items() if seen.verdict == "certain"]
    if not on_cpu:
        return None
    where = rank_list(int(rank) for rank in on_cpu if rank.isdecimal())
    gpus = status.health.gpus
    why = (
        f"; {status.health.without_gpu()}"
        if gpus.state in ("absent", "ok") and not gpus.gpus
        else ""
    )
    return f"the model runs on the CPU on {where}{why}"


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
    age, limit = or_unknown(repo.age_s), or_unknown(repo.limit_s)
    return f"the published gradients are {age} s old (limit {limit} s)"


def _no_step(status: StatusDocument, memory: Memory) -> str | None:
    if status.steps.total_steps is not None:
        return None
    return "the miner starts" if status.state == "starting" else "no step seen yet"


def _overdue(status: StatusDocument, memory: Memory) -> str | None:
    """A step takes far longer than any before it, and the guard has not called it a hang yet."""
    steps, hang = status.steps, status.hang
    age, slowest = steps.last_step_age_s, steps.max_s
    if age is None or slowest is None or steps.phase not in _STEPPING:
        return None
    if status.state != "running" or age < max(_QUIET_S, _QUIET_FACTOR * slowest):
        return None
    limit = hang.limit_s
    until = f"; counted as a hang from {limit:.0f} s on" if limit is not None else ""
    return f"no step for {age:.0f} s (the longest took {slowest:.1f} s){until}"


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
        "find the first failure: miner-guard logs --event incident; fix it, start the guard",
        "crash_loop",
    ),
    Condition("paused", STOPPED, _paused, "resume it: miner-guard ctl resume", "miner_paused"),
    Condition("finished", STOPPED, _finished, "", "miner_finished"),
    Condition(
        "done", STOPPED, _done, "start it again: pm2 restart, or miner-guard run", "guard_stopped"
    ),
    Condition(
        "restarting",
        NOT_EARNING,
        _restarting,
        "nothing yet, the guard restarts it; the cause: miner-guard logs --level error -n 5",
        "miner_restarting",
    ),
    Condition(
        "hang",
        NOT_EARNING,
        _hanging,
        "read the stacks of the named rank: miner-guard logs --event stack_dump names their folder",
        "hang_detected",
    ),
    Condition(
        "ending",
        NOT_EARNING,
        _ending,
        "wait for the end; then miner-guard logs --level error -n 5 shows why it ended",
        "miner_exited",
    ),
    Condition(
        "loss_nan",
        NOT_EARNING,
        _loss_not_finite,
        "miner-guard ctl pause, restore the last good checkpoint, then miner-guard ctl resume",
        "loss_nan",
    ),
    Condition(
        "cpu_fallback",
        NOT_EARNING,
        _on_cpu,
        "miner-guard ctl pause, check CUDA: miner-guard doctor --deep, then miner-guard ctl resume",
        "cpu_fallback",
    ),
    Condition(
        "unregistered",
        NOT_EARNING,
        _unregistered,
        "register the hotkey again (btcli subnet register), then miner-guard ctl restart",
        "chain_unregistered",
    ),
    Condition(
        "rejected",
        NOT_EARNING,
        _rejected,
        "see each rule that fails: miner-guard audit; fix it, then upload again",
        "audit_failed",
    ),
    Condition(
        "stale",
        NOT_EARNING,
        _stale,
        "see what stops uploads: miner-guard logs --event upload_blocked --event upload_failed",
        "repo_stale",
    ),
    Condition(
        "no_step",
        UNKNOWN,
        _no_step,
        "wait for the first step; after minutes: miner-guard logs --event no_step_yet",
        None,
        "unknown",
    ),
    Condition(
        "overdue",
        DEGRADED,
        _overdue,
        "wait for the guard's judgement; the ranks and their phases: miner-guard top",
        "hang_detected",
        "likely",
    ),
    Condition("gpu_fault", DEGRADED, _gpu_fault, "check the GPUs: miner-guard doctor", "gpu_fault"),
    Condition("disk", DEGRADED, _disk, "free space on the full disk: df -h", "disk_full"),
    Condition(
        "due_but_blocked",
        DEGRADED,
        _due_but_blocked,
        "see each rule, value and limit: miner-guard logs --event upload_blocked -n 1 --json",
        "upload_blocked",
    ),
    Condition(
        "straggler",
        DEGRADED,
        _straggling,
        "see its times: miner-guard top; its GPU: nvidia-smi -q -d CLOCK,TEMPERATURE",
        "straggler",
    ),
    Condition(
        "slow",
        DEGRADED,
        _slow,
        "see where the time goes: miner-guard logs --event timing_breakdown -n 1",
        "slow_step",
    ),
    Condition(
        "over_budget",
        DEGRADED,
        _over_budget,
        "see the most expensive operation: miner-guard costs",
        "monitoring_over_budget",
    ),
)
"""The order of judgement: conditions that stop earning before those that only slow it."""
