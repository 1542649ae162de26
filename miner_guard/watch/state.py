"""State: the one judgement of a run. Four axes (life, health, earning, freshness) follow from the
status document and the events that still hold; `state_words` puts them into words."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from miner_guard.config import HangSettings
from miner_guard.exits import UNAVAILABLE
from miner_guard.rank.layout import Now, StepRecord
from miner_guard.record.events import Event, event
from miner_guard.record.status_document import (
    NO_REPO,
    RunState,
    StatusDocument,
    StepsStatus,
    read_status,
)
from miner_guard.record.words import known, rank_list
from miner_guard.system.clock import iso_utc, parse_iso_utc
from miner_guard.watch.base import Context, Launch, Monitor
from miner_guard.watch.hang import FACTOR
from miner_guard.watch.state_words import (
    AT_RISK,
    FINISHED,
    GREEN,
    GREY,
    HEALTH,
    HUNG,
    NO,
    NOT_PROVEN,
    RED,
    REFUSED,
    RESTARTING,
    STARTING,
    STOPPED,
    TRAINING,
    YELLOW,
    YES,
    StateWeek,
    first_words,
    headline,
)

_RECOVERED_SHARE = 0.9
"""Steps count as slow until their median falls below this share of the median at the start of the
slowdown, so that a median near the limit does not change the state with each step."""


@dataclass
class Memory:
    """Events that stay in effect until another event clears them. Bounded."""

    limits: HangSettings = field(default_factory=HangSettings)
    exit: str | None = None
    """How the last launch ended, until the miner is stepping again."""

    restart: Mapping[str, Any] | None = None
    hang: str | None = None
    """The last hang, until the next step."""

    crash_loop: str | None = None
    incident: Mapping[str, Any] | None = None
    """Fields of the last incident, until the miner is stepping again."""

    nan: Mapping[str, Any] | None = None
    """Fields of the last `loss_nan`, until the loss is finite again."""

    checkpoint: Mapping[str, Any] | None = None
    """Fields of the last `checkpoint_saved` from before the loss became NaN."""

    gpu_faults: dict[str, str] = field(default_factory=dict)
    disks: dict[str, str] = field(default_factory=dict)
    straggler: str | None = None
    straggler_rank: int | None = None
    silent_s: float = 0.0
    """Seconds without a step when the last hang was found; 0 again after the next step."""

    slow_from_s: float | None = None
    """The median step time when steps became slow; None while steps are not slow."""

    def take(self, event: Event) -> None:
        """Update the memory from one event."""
        fields = event.fields
        if event.name == "miner_exited":
            self.exit = str(fields.get("how"))
        elif event.name == "miner_restarting":
            self.restart = fields
        elif event.name == "hang_detected":
            self.hang = str(fields.get("detail"))
            self.silent_s = float(fields.get("idle_s") or 0.0)
        elif event.name == "crash_loop":
            self.crash_loop = str(fields.get("detail"))
        elif event.name == "incident":
            self.incident = fields
        elif event.name == "loss_nan":
            self.nan = fields
        elif event.name == "checkpoint_saved" and self.nan is None:
            self.checkpoint = fields
        elif event.name == "straggler" and event.level == "info":
            self.straggler = self.straggler_rank = None
        elif event.name == "straggler":
            self.straggler = f"rank {event.rank} {fields.get('detail')}"
            self.straggler_rank = event.rank
        elif event.name == "gpu_fault":
            begins = () if event.level == "info" else ("gpu_fault",)
            self._toggle(self.gpu_faults, f"GPU {fields.get('gpu')}", event, *begins)
        elif event.name in ("disk_full", "disk_stuck"):
            ongoing = () if event.level == "info" else ("disk_full", "disk_stuck")
            self._toggle(self.disks, str(fields.get("what")), event, *ongoing)

    def launched(self) -> None:
        """Record a new launch: its losses and ranks are other ones."""
        self.nan = self.straggler = self.straggler_rank = None

    def stepped(self, loss: float | None) -> None:
        """Record that training completed a step, so whatever was blocking it has cleared."""
        self.hang = self.restart = self.incident = self.exit = None
        self.silent_s = 0.0
        if loss is not None and math.isfinite(loss):
            self.nan = None

    def watch(self, steps: StepsStatus) -> None:
        """Update the memory from the latest step times."""
        median_s = steps.p50_s
        if median_s is None:
            self.slow_from_s = None
        elif steps.grade == "bad":
            self.slow_from_s = min(self.slow_from_s or median_s, median_s)
        elif self.slow_from_s is not None and median_s < _RECOVERED_SHARE * self.slow_from_s:
            self.slow_from_s = None

    @staticmethod
    def _toggle(table: dict[str, str], key: str, event: Event, *begins: str) -> None:
        if event.name not in begins:
            table.pop(key, None)
        elif len(table) < 64:
            silent = "it is not responding" if event.name == "disk_stuck" else None
            fields = event.fields
            table[key] = str(silent or fields.get("reason") or fields.get("what"))


Action = Callable[[StatusDocument, Memory], str]
"""Returns the next step; empty if there is nothing to do."""


def after_crash_loop(status: StatusDocument, memory: Memory) -> str:
    """Advise the reader to apply the last incident's fix and then start the guard."""
    failures = "`miner-guard logs --event incident`"
    incident = memory.incident or {}
    if not incident.get("fix"):
        return f"see each failure with {failures}, fix it, then start the guard: {_start(status)}"
    fix = str(incident["fix"]).rstrip(".")
    return f"{fix}. Then start the guard: {_start(status)}. To see each failure: {failures}"


def start_again(status: StatusDocument, memory: Memory) -> str:
    """Advise the reader to start the guard with the same command as before."""
    return f"start it again: {_start(status)}"


def restore(status: StatusDocument, memory: Memory) -> str:
    """Advise the reader to go back to the last checkpoint from before the loss became NaN."""
    saved = memory.checkpoint
    if saved is None:
        which = "a checkpoint from before the NaN (the miner reported none to the guard)"
    else:
        which = f"the last checkpoint from before the NaN, `{saved.get('path')}`"
    return f"`miner-guard ctl pause`, restore {which}, then `miner-guard ctl resume`"


def after_refusal(status: StatusDocument, memory: Memory) -> str:
    """Advise the reader to fix what the preflight found, then to start the guard."""
    return f"see every check: `miner-guard doctor`; fix it, then start the guard: {_start(status)}"


def free_space(status: StatusDocument, memory: Memory) -> str:
    """Advise the reader to free space on the disk that holds the state directory."""
    path = shlex.quote(status.state_dir) if status.state_dir else "."
    return (
        f"free up space on the disk that holds {status.state_dir or 'the state directory'} "
        f"(`df -h {path}`); the guard then resumes writing on its own"
    )


def satisfy_rule(status: StatusDocument, memory: Memory) -> str:
    """Pass on the advice of the rule that blocks the upload."""
    decision = status.uploads.decision
    _, advice = split_advice(decision.reason if decision else None)
    rules = "`miner-guard logs --event upload_blocked -n 1 --json`"
    return (
        f"{advice}; to see each rule and its limit: {rules}"
        if advice
        else f"see each rule: {rules}"
    )


def split_advice(reason: str | None) -> tuple[str, str]:
    """The problem and the advice in a validator rule's sentence, such as `base outer_step (60) <
    network (61). Reload the global state`; the advice is empty if the rule gives none."""
    problem, _, advice = (reason or "").partition(". ")
    return problem.rstrip("."), f"{advice[:1].lower()}{advice[1:]}".rstrip(".")


def inspect_straggler(status: StatusDocument, memory: Memory) -> str:
    """Advise the reader to find out why one GPU is slower than the others."""
    rank = memory.straggler_rank
    place, option = "its GPU", ""
    if (gpu := _gpu_of(status, rank)) is not None:
        place, option = f"GPU {gpu}{_on_host(status)}", f"-i {gpu} "
    elif (process := status.rank_processes.get(str(rank))) is not None:
        place = f"the GPU of local rank {process.local_rank}{_on_host(status)}"
    query = f"`nvidia-smi {option}-q -d CLOCK,TEMPERATURE`"
    return (
        f"rank {rank} runs on {place}; check it with {query}, and all ranks with `miner-guard top`"
    )


def _start(status: StatusDocument) -> str:
    """The command that starts the guard again."""
    return f"`{status.start_command or 'miner-guard run'}`"


def _on_host(status: StatusDocument) -> str:
    return f" on host {status.host}" if status.host else ""


def _gpu_of(status: StatusDocument, rank: int | None) -> int | None:
    """NVML's index of the GPU that a rank reported in its diagnosis; None if unknown.

    Ranks are matched by GPU UUID: CUDA's numbering depends on CUDA_VISIBLE_DEVICES.
    """
    uuid = next((r.get("uuid") for r in status.diagnosis.ranks if r.get("rank") == rank), None)
    rows = (row for row in status.health.gpus.gpus if uuid and row.get("uuid") == uuid)
    return next((row.get("index") for row in rows), None)


_QUIET_S = 20.0
_QUIET_FACTOR = 4.0
"""A step is overdue once it has taken longer than both `_QUIET_S` seconds and this multiple of the
longest step so far. Most pauses in a healthy run are shorter."""

_STEPPING = frozenset({"", "data", "forward", "backward", "optimizer", "collective"})
"""Phases that take about the same time in every step; any other phase may last minutes."""

_ENDING = {
    "stopping": "stopping its processes",
    "ending": "ending its processes",
    "waiting": "waiting for the next launch",
    "running": "waiting for the first step",
}
"""The stage of a restart, by the supervisor's state."""


@dataclass(frozen=True)
class Condition:
    """One condition that can decide the state."""

    key: str
    life: str
    colour: str
    cause: Callable[[StatusDocument, Memory], str | None]
    """Returns the cause if the condition holds, else None."""

    action: Action | str
    """The next step while the condition holds."""

    event: str | None
    endangers: bool = False
    """Whether it keeps a training miner from publishing what validators accept."""


def _unknown(value: Any) -> str:
    return "unknown" if value is None else str(value)


def _gave_up(status: StatusDocument, memory: Memory) -> str | None:
    if memory.crash_loop is None:
        return None
    # The guard's reason ends with the fix, which is part of the next step.
    fix = str((memory.incident or {}).get("fix") or "")
    return f"crash loop: {memory.crash_loop.removesuffix(fix).rstrip(' .;')}"


def _refused(status: StatusDocument, memory: Memory) -> str | None:
    return status.reason if status.exit_code == UNAVAILABLE else None


def _finished(status: StatusDocument, memory: Memory) -> str | None:
    last = status.last_exit
    if status.state != "done" or last is None or not last.finished:
        return None
    return "the miner finished its work"


def _failed(status: StatusDocument, memory: Memory) -> str | None:
    return status.reason if status.state == "done" and status.exit_code else None


def _done(status: StatusDocument, memory: Memory) -> str | None:
    if status.state == "done":
        return "the guard stopped the miner" + (f" ({status.reason})" if status.reason else "")
    asked = memory.restart is None and memory.hang is None
    return "the guard is stopping the miner" if status.state == "stopping" and asked else None


def _paused(status: StatusDocument, memory: Memory) -> str | None:
    return "an operator paused the miner" if status.state == "paused" else None


def _restarting(status: StatusDocument, memory: Memory) -> str | None:
    if status.state == "running" and status.steps.total_steps is None:
        return None
    if memory.restart is None:
        if status.state not in ("ending", "waiting") or memory.hang:
            return None
        return memory.exit or "the miner has ended"
    attempt = f"attempt {memory.restart.get('attempt')} of {memory.restart.get('max_restarts')}"
    why = memory.hang or str(memory.restart.get("cause"))
    return f"{why}; restarting, {attempt}"


def _hanging(status: StatusDocument, memory: Memory) -> str | None:
    return status.hang.hang or memory.hang


def _loss_not_finite(status: StatusDocument, memory: Memory) -> str | None:
    steps, nan = status.steps, memory.nan
    loss = steps.loss
    if nan is None:
        if loss not in ("NaN", "Infinity", "-Infinity"):
            return None
        return f"loss is {loss} at step {_unknown(steps.inner_step)}"
    word = loss if isinstance(loss, str) else nan.get("loss") or "NaN"
    if nan.get("step") is None:
        return f"loss is {word}"
    outer = nan.get("outer_step")
    of = "" if outer is None else f" of outer step {outer}"
    return f"loss has been {word} since step {nan['step']}{of}"


def _on_cpu(status: StatusDocument, memory: Memory) -> str | None:
    on_cpu = [r for r, row in status.ranks.cpu_fallback.items() if row.verdict == "certain"]
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
    return _age_words(status) if status.uploads.repo.stale else None


def _age_words(status: StatusDocument) -> str:
    repo = status.uploads.repo
    limit = "" if repo.limit_s is None else f" (limit {repo.limit_s:,.0f} s)"
    return f"the published files are {known(repo.age_s, ',.0f')} s old{limit}"


def _preflight(status: StatusDocument, memory: Memory) -> str | None:
    return "the preflight is checking this machine" if status.state == "starting" else None


def _waited_s(status: StatusDocument) -> float | None:
    try:
        return parse_iso_utc(str(status.updated)) - parse_iso_utc(str(status.started))
    except ValueError:
        return None


def _late(status: StatusDocument, memory: Memory) -> str | None:
    waited_s, limit = _waited_s(status), memory.limits.first_step_s
    if not _no_step(status, memory) or waited_s is None or waited_s <= limit:
        return None
    return f"no first step within {waited_s:.0f} s (limit {limit:.0f} s)"


def _no_step(status: StatusDocument, memory: Memory) -> str | None:
    return "no step yet" if status.steps.total_steps is None else None


def _silent(status: StatusDocument, memory: Memory) -> str | None:
    """Return the cause if a miner whose ranks report nothing has printed no step for as long as a
    hang lasts."""
    age = status.steps.last_step_age_s
    if status.hang.watching or status.state != "running" or age is None:
        return None
    limit = max(memory.limits.min_s, FACTOR * (status.steps.max_s or 0.0))
    return f"no step for {age:.0f} s (limit {limit:.0f} s)" if age > limit else None


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
    problem, _ = split_advice(decision.reason)
    return f"the gate is blocking an upload that is due: {problem}"


def _over_budget(status: StatusDocument, memory: Memory) -> str | None:
    costs = status.costs
    if costs.budget_status != "critical":
        return None
    return f"monitoring takes {costs.share_pct or 0.0:.1f}% of training time"


_SEE_ERRORS = "`miner-guard logs --level error -n 5`"
_SEE_STACKS = (
    "read the stacks of the rank named above; to find their folder: "
    "`miner-guard logs --event stack_dump -n 1`"
)

CONDITIONS: tuple[Condition, ...] = (
    Condition("crash_loop", STOPPED, RED, _gave_up, after_crash_loop, "crash_loop"),
    Condition("refused", REFUSED, RED, _refused, after_refusal, "preflight"),
    Condition("finished", FINISHED, GREY, _finished, "", "miner_finished"),
    Condition("failed", STOPPED, RED, _failed, start_again, "guard_stopped"),
    Condition("done", STOPPED, GREY, _done, start_again, "guard_stopped"),
    Condition(
        "paused", STOPPED, GREY, _paused, "resume it: `miner-guard ctl resume`", "miner_paused"
    ),
    Condition(
        "restarting",
        RESTARTING,
        YELLOW,
        _restarting,
        f"nothing yet: the guard restarts the miner; to see why it failed: {_SEE_ERRORS}",
        "miner_restarting",
    ),
    Condition("hang", HUNG, RED, _hanging, _SEE_STACKS, "hang_detected"),
    Condition("preflight", STARTING, GREY, _preflight, "", None),
    Condition("loss_nan", TRAINING, RED, _loss_not_finite, restore, "loss_nan", True),
    Condition(
        "cpu_fallback",
        TRAINING,
        RED,
        _on_cpu,
        (
            "`miner-guard ctl pause`; `miner-guard doctor` shows the CUDA problem; "
            "once it is fixed, `miner-guard ctl resume`"
        ),
        "cpu_fallback",
        True,
    ),
    Condition(
        "unregistered",
        TRAINING,
        RED,
        _unregistered,
        "register the hotkey again: `btcli subnet register`, then `miner-guard ctl restart`",
        "chain_status",
    ),
    Condition(
        "rejected",
        TRAINING,
        RED,
        _rejected,
        "see each failed rule with `miner-guard audit`, fix the cause, then upload again",
        "audit_failed",
    ),
    Condition(
        "stale",
        TRAINING,
        RED,
        _stale,
        (
            "see what is stopping uploads: "
            "`miner-guard logs --event upload_blocked --event upload_failed -n 3`"
        ),
        "repo_stale",
    ),
    Condition(
        "late",
        STARTING,
        YELLOW,
        _late,
        "see what it does: `miner-guard logs --event no_step_yet -n 1`",
        "no_step_yet",
    ),
    Condition(
        "no_step",
        STARTING,
        GREY,
        _no_step,
        (
            "wait for the first step; if none comes within a few minutes: "
            "`miner-guard logs --event no_step_yet`"
        ),
        None,
    ),
    Condition("silent", HUNG, RED, _silent, f"see its last lines: {_SEE_ERRORS}", None),
    Condition(
        "overdue",
        TRAINING,
        YELLOW,
        _overdue,
        "wait for the hang detector; to see each rank's phase: `miner-guard top`",
        "hang_detected",
        True,
    ),
    Condition(
        "gpu_fault",
        TRAINING,
        YELLOW,
        _gpu_fault,
        "check the GPUs: `miner-guard doctor`",
        "gpu_fault",
    ),
    Condition("disk", TRAINING, YELLOW, _disk, free_space, "disk_full"),
    Condition(
        "due_but_blocked", TRAINING, YELLOW, _due_but_blocked, satisfy_rule, "upload_blocked", True
    ),
    Condition("straggler", TRAINING, YELLOW, _straggling, inspect_straggler, "straggler"),
    Condition(
        "slow",
        TRAINING,
        YELLOW,
        _slow,
        "see where the time goes: `miner-guard logs --event timing_breakdown -n 5`",
        "slow_step",
    ),
    Condition(
        "over_budget",
        TRAINING,
        YELLOW,
        _over_budget,
        "see the most expensive operation: `miner-guard costs`",
        "monitoring_over_budget",
    ),
)
"""The order of judgement: what ends training, what makes it useless, what slows it."""

_OF_EARNING = ("unregistered", "rejected", "stale")
"""Conditions whose cause is already why the miner does not earn."""


def judge(status: StatusDocument, memory: Memory) -> RunState:
    """The state that this status document and the events that hold amount to."""
    memory.watch(status.steps)
    for condition in CONDITIONS:
        cause = condition.cause(status, memory)
        if cause is None:
            continue
        colour, action = condition.colour, condition.action
        endangered = condition.endangers or condition.life != TRAINING
        earning, why = judge_earning(status, endangered=endangered)
        if earning == NO and condition.life == TRAINING:
            colour = RED
        if (why and condition.key not in _OF_EARNING) and condition.life in (TRAINING, HUNG):
            cause = f"{cause}; {why}"
        return RunState(
            life=condition.life,
            stage=_stage(condition, status),
            health=HEALTH.get(colour, "well"),
            earning=earning,
            colour=colour,
            cause=cause,
            next_step=action if isinstance(action, str) else action(status, memory),
            event=condition.event,
            key=condition.key,
        )
    return _healthy(status)


def _stage(condition: Condition, status: StatusDocument) -> str | None:
    if condition.life == STARTING:
        return "preflight" if condition.key == "preflight" else "waiting for the first step"
    return _ENDING.get(str(status.state)) if condition.life == RESTARTING else None


def _healthy(status: StatusDocument) -> RunState:
    """The state if no condition holds."""
    earning, why = judge_earning(status, endangered=False)
    repo = status.uploads.repo
    step = ""
    if earning == NOT_PROVEN:
        if repo.reason == NO_REPO:
            step = "set [repo] in guard.toml; `miner-guard config --changed` shows it"
        elif repo.revision is None:
            step = "wait for the first upload; `miner-guard top` shows what it is waiting for"
        else:
            step = "check the published files: `miner-guard audit`"
    return RunState(
        life=TRAINING,
        health="well",
        earning=earning,
        colour=GREEN,
        cause=_progress(status) + (f"; {why}" if why else ""),
        next_step=step,
        key="well",
    )


def judge_earning(status: StatusDocument, *, endangered: bool) -> tuple[str | None, str]:
    """Whether the miner earns, and why, in words that the headline lacks; None for a miner that
    publishes nothing. What validators have earns until it is too old, whatever happens to the
    miner; `endangered` says that nothing newer follows."""
    chain, uploads, repo = status.chain, status.uploads, status.uploads.repo
    watched = repo.reason not in (None, NO_REPO) or repo.empty or repo.age_s is not None
    on_chain = chain.registered is False or chain.incentive or uploads.network is not None
    if not (watched or on_chain or uploads.audit or uploads.upload or uploads.decision):
        return None, ""
    for trouble in (_unregistered, _rejected, _stale):
        if (why := trouble(status, Memory())) is not None:
            return NO, why
    if (why := _why_not_proven(status)) is not None:
        return NOT_PROVEN, f"earning is not proven: {why}"
    if endangered:
        return AT_RISK, "" if repo.age_s is None else _age_words(status)
    return YES, ""


def _why_not_proven(status: StatusDocument) -> str | None:
    """None if the chain shows that the miner earns, or an audit that saw everything a validator
    needs. A verified upload alone proves nothing."""
    uploads = status.uploads
    audit = uploads.audit
    if status.chain.incentive:
        return None
    if uploads.network is not None:
        return uploads.network
    if audit is not None and audit.outcome == "accepted":
        return None
    if audit is not None and audit.outcome == "unknown":
        return f"the last audit could not tell: {audit.detail}"
    if uploads.upload is not None and uploads.upload.outcome == "verified":
        return "the last upload was verified, but no audit has judged it"
    return uploads.repo.reason or "nothing has been uploaded yet"


def _progress(status: StatusDocument) -> str:
    steps = status.steps
    loss = steps.loss
    words = f"training at outer step {_unknown(steps.outer_step)}, inner step "
    words += _unknown(steps.inner_step)
    return words + (f", loss {loss:.2f}" if isinstance(loss, (int, float)) else "")


_SETTLED_S = 5.0
"""The log tells of a state once it has held this long; shorter ones have events of their own. The
surfaces show each state at once."""

_UNWATCHED_S = 600.0
"""If two ticks are further apart than this (the host was suspended), the time in between
counts as unwatched."""

_REPORTED = ("life", "stage", "health", "earning", "since", "cause", "next_step", "key")


def _place(state: RunState) -> tuple[str, str | None]:
    """What makes a state another one; the numbers in its sentence do not."""
    return first_words(state), state.key


class StateMonitor(Monitor):
    """Judges the status document at each tick; the log tells of each change that lasts."""

    name = "verdict"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._memory = Memory(context.config.hang)
        self._ended = False
        self._state: RunState | None = None
        self._logged: RunState | None = None
        self._changed_at = context.clock.monotonic()
        """When the condition began that holds now."""

        before = read_status(context.state)
        state = before.verdict if before is not None else None
        self._week = StateWeek(*((state.week, state.week_start) if state else ({},)))
        self._counted_at = context.clock.monotonic()

    def on_launch(self, launch: Launch) -> Iterable[Event]:
        self._memory.launched()
        return ()

    def on_event(self, event: Event) -> Iterable[Event]:
        self._memory.take(event)
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Event]:
        self._memory.stepped(steps[-1].loss)
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        self._count(now)
        self._judge(now)
        settled = now - self._changed_at >= _SETTLED_S
        return [self._tell()] if settled and self._is_news() else []

    def on_stop(self) -> Iterable[Event]:
        """The final state: nothing is training here anymore."""
        now = self.context.clock.monotonic()
        self._count(now)
        self._ended = True
        self._judge(now)
        return [self._tell()] if self._is_news() else []

    def _judge(self, now: float) -> None:
        document = self.context.status()
        if not document and not self._ended:
            return
        status = StatusDocument.from_json(document)
        if self._ended:
            status = replace(status, state="done")
        state = judge(status, self._memory)
        before, self._state = self._state, state
        if before is None or _place(before) != _place(state):
            self._changed_at = now
        if before is not None and first_words(before) == first_words(state):
            self._state = replace(state, since=before.since)
            return
        wall = self.context.clock.wall()
        begin = wall - self._memory.silent_s
        if self._logged is not None and first_words(self._logged) == first_words(state):
            # What was in between was too short for the log: it goes on.
            self._state = replace(state, since=self._logged.since)
            return
        self._state = replace(state, since=iso_utc(begin))
        before_colour = GREY if before is None else str(before.colour)
        self._week.correct(before_colour, str(state.colour), begin, wall)

    def _is_news(self) -> bool:
        logged, state = self._logged, self._state
        return state is not None and (logged is None or _place(logged) != _place(state))

    def _tell(self) -> Event:
        assert self._state is not None
        previous, self._logged = self._logged, self._state
        return event(
            "verdict_changed",
            "info",
            f"VERDICT: {headline(self._state)}",
            headline=headline(self._state),
            previous=None if previous is None else previous.life,
            **{name: getattr(self._state, name) for name in _REPORTED},
        )

    def _count(self, now: float) -> None:
        """Add the time since the last call to the week's totals."""
        passed_s, self._counted_at = now - self._counted_at, now
        if passed_s <= _UNWATCHED_S:
            wall = self.context.clock.wall()
            colour = GREY if self._state is None else str(self._state.colour)
            self._week.add(colour, wall - passed_s, wall)

    def snapshot(self) -> Mapping[str, Any]:
        self._judge(self.context.clock.monotonic())
        state = self._state or RunState(
            life=STARTING, health="well", colour=GREY, cause="the guard has just started"
        )
        return replace(state, week=self._week.to_json(), week_start=self._week.start).to_json()
