"""The conditions that decide the verdict, worst first, each with its next step. Pure.

A condition reads the status document (the present state) and `Memory`, the few findings
with a lasting effect. Its next step is in `verdict_actions`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miner_guard.detectors import verdict_actions as actions
from miner_guard.detectors.verdict_actions import Action, always
from miner_guard.detectors.verdict_memory import Memory
from miner_guard.eventlog.status_document import StatusDocument
from miner_guard.record.words import known, rank_list

_QUIET_S = 20.0
_QUIET_FACTOR = 4.0
"""A step is overdue once it has taken longer than both `_QUIET_S` seconds and this multiple of the
longest step so far. Most pauses in a healthy run are shorter."""

_STEPPING = frozenset({"", "data", "forward", "backward", "optimizer", "collective"})
"""Phases that take about the same time in every step; any other phase may last minutes."""

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
class Condition:
    """One condition that can decide the verdict."""

    key: str
    state: str
    cause: Callable[[StatusDocument, Memory], str | None]
    """Returns the cause if the condition holds, else None."""

    action: Action
    """Returns the next step while the condition holds."""

    event: str | None
    confidence: str = "measured"


def or_unknown(value: Any) -> str:
    """Return the value as text, or `unknown` for None."""
    return "unknown" if value is None else str(value)


def _paused(status: StatusDocument, memory: Memory) -> str | None:
    return "an operator paused the miner" if status.state == "paused" else None


def _gave_up(status: StatusDocument, memory: Memory) -> str | None:
    if memory.crash_loop is None:
        return None
    # The guard's reason ends with the fix, which is part of the next step.
    fix = str((memory.incident or {}).get("fix") or "")
    return f"crash loop: {memory.crash_loop.removesuffix(fix).rstrip(' .;')}"


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
    if memory.nan is None or memory.nan.get("step") is None:
        return f"loss is {loss} at step {or_unknown(steps.inner_step)}"
    outer = memory.nan.get("outer_step")
    of = "" if outer is None else f" of outer step {outer}"
    return f"loss has been {loss} since step {memory.nan['step']}{of}"


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
    return f"the model is running on the CPU on {where}{why}"


def _unregistered(status: StatusDocument, memory: Memory) -> str | None:
    return "the hotkey is not registered" if status.chain.registered is False else None


def _rejected(status: StatusDocument, memory: Memory) -> str | None:
    audit = status.uploads.audit
    if audit is None or audit.outcome != "rejected":
        return None
    return f"validators would reject the published files: {audit.detail}"


def _stale(status: StatusDocument, memory: Memory) -> str | None:
    repo = status.uploads.repo
    if not repo.stale:
        return None
    age, limit = known(repo.age_s, ",.0f"), known(repo.limit_s, ",.0f")
    return f"the published gradients are {age} s old (limit {limit} s)"


def _no_step(status: StatusDocument, memory: Memory) -> str | None:
    if status.steps.total_steps is not None:
        return None
    return "the miner is starting" if status.state == "starting" else "no step seen yet"


def _overdue(status: StatusDocument, memory: Memory) -> str | None:
    """Return the cause if a step takes far longer than any before it and the guard has not called
    it a hang yet."""
    steps, hang = status.steps, status.hang
    age, slowest = steps.last_step_age_s, steps.max_s
    if age is None or slowest is None or steps.phase not in _STEPPING:
        return None
    if status.state != "running" or age < max(_QUIET_S, _QUIET_FACTOR * slowest):
        return None
    limit = hang.limit_s
    until = f"; the guard reports a hang after {limit:.0f} s" if limit is not None else ""
    return f"no step for {age:.0f} s (the longest took {slowest:.1f} s){until}"


def _gpu_fault(status: StatusDocument, memory: Memory) -> str | None:
    faults = [f"{gpu} {what}" for gpu, what in sorted(memory.gpu_faults.items())]
    return "; ".join(faults) or None


def _disk(status: StatusDocument, memory: Memory) -> str | None:
    if not memory.disks:
        return None
    full = any("space" in reason for reason in memory.disks.values())
    rows = [f"{what} cannot be written ({reason})" for what, reason in sorted(memory.disks.items())]
    return f"the disk {'is full' if full else 'is not responding'}: {'; '.join(rows)}"


def _straggling(status: StatusDocument, memory: Memory) -> str | None:
    return memory.straggler


def _slow(status: StatusDocument, memory: Memory) -> str | None:
    steps = status.steps
    p50 = steps.p50_s
    slow = p50 is not None and memory.slow_from_s is not None
    return f"steps take {p50:.0f} s" if slow else None


def _due_but_blocked(status: StatusDocument, memory: Memory) -> str | None:
    decision, repo = status.uploads.decision, status.uploads.repo
    if decision is None or decision.allowed is not False or not repo.due:
        return None
    age = "" if repo.age_s is None else f" (the published files are {repo.age_s:,.0f} s old)"
    problem, _ = actions.split_advice(decision.reason)
    return f"the gate is blocking an upload that is due{age}: {problem}"


def _over_budget(status: StatusDocument, memory: Memory) -> str | None:
    costs = status.costs
    if costs.budget_status != "critical":
        return None
    return f"monitoring takes {costs.share_pct or 0.0:.1f}% of training time"


CONDITIONS: tuple[Condition, ...] = (
    Condition("crash_loop", STOPPED, _gave_up, actions.after_crash_loop, "crash_loop"),
    Condition(
        "paused", STOPPED, _paused, always("resume it: `miner-guard ctl resume`"), "miner_paused"
    ),
    Condition("finished", STOPPED, _finished, always(""), "miner_finished"),
    Condition("done", STOPPED, _done, actions.start_again, "guard_stopped"),
    Condition(
        "restarting",
        NOT_EARNING,
        _restarting,
        always(
            "nothing yet: the guard is restarting the miner; to see why it failed: "
            "`miner-guard logs --level error -n 5`"
        ),
        "miner_restarting",
    ),
    Condition(
        "hang",
        NOT_EARNING,
        _hanging,
        always(
            "read the stacks of the rank named above; "
            "to find their folder: `miner-guard logs --event stack_dump -n 1`"
        ),
        "hang_detected",
    ),
    Condition(
        "ending",
        NOT_EARNING,
        _ending,
        always(
            "wait until the launch has ended; to see why it ended: "
            "`miner-guard logs --level error -n 5`"
        ),
        "miner_exited",
    ),
    Condition("loss_nan", NOT_EARNING, _loss_not_finite, actions.restore, "loss_nan"),
    Condition(
        "cpu_fallback",
        NOT_EARNING,
        _on_cpu,
        always(
            "`miner-guard ctl pause`; `miner-guard doctor --deep` shows the CUDA problem; "
            "once it is fixed, `miner-guard ctl resume`"
        ),
        "cpu_fallback",
    ),
    Condition(
        "unregistered",
        NOT_EARNING,
        _unregistered,
        always(
            "register the hotkey again: `btcli subnet register`, then `miner-guard ctl restart`"
        ),
        "chain_unregistered",
    ),
    Condition(
        "rejected",
        NOT_EARNING,
        _rejected,
        always("see each failed rule with `miner-guard audit`, fix the cause, then upload again"),
        "audit_failed",
    ),
    Condition(
        "stale",
        NOT_EARNING,
        _stale,
        always(
            "see what is stopping uploads: "
            "`miner-guard logs --event upload_blocked --event upload_failed -n 3`"
        ),
        "repo_stale",
    ),
    Condition(
        "no_step",
        UNKNOWN,
        _no_step,
        always(
            "wait for the first step; if none comes within a few minutes: "
            "`miner-guard logs --event no_step_yet`"
        ),
        None,
        "unknown",
    ),
    Condition(
        "overdue",
        DEGRADED,
        _overdue,
        always("wait for the guard's verdict; to see each rank's phase: `miner-guard top`"),
        "hang_detected",
        "likely",
    ),
    Condition(
        "gpu_fault",
        DEGRADED,
        _gpu_fault,
        always("check the GPUs: `miner-guard doctor`"),
        "gpu_fault",
    ),
    Condition("disk", DEGRADED, _disk, actions.free_space, "disk_full"),
    Condition(
        "due_but_blocked", DEGRADED, _due_but_blocked, actions.satisfy_rule, "upload_blocked"
    ),
    Condition("straggler", DEGRADED, _straggling, actions.inspect_straggler, "straggler"),
    Condition(
        "slow",
        DEGRADED,
        _slow,
        always("see where the time goes: `miner-guard logs --event timing_breakdown -n 1`"),
        "slow_step",
    ),
    Condition(
        "over_budget",
        DEGRADED,
        _over_budget,
        always("see the most expensive operation: `miner-guard costs`"),
        "monitoring_over_budget",
    ),
)
"""The order of judgement: conditions that stop the miner from earning come before those that only
reduce its earnings."""
