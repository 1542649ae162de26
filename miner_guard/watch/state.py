"""State: is the miner earning, since when, why not, and what to do; one sentence for all surfaces
and one line per change.
"""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from miner_guard.eventlog.catalog import make_finding, message
from miner_guard.eventlog.section import LastRead
from miner_guard.eventlog.status_document import (
    NO_REPO,
    StatusDocument,
    StepsStatus,
    VerdictStatus,
    read_status,
)
from miner_guard.rank.layout import Now, StepRecord
from miner_guard.record.events import Event
from miner_guard.record.words import known, percentages, rank_list
from miner_guard.system.clock import iso_utc, parse_iso_utc
from miner_guard.watch.base import Context, Monitor

_LASTING = frozenset({"loss_nan", "audit_failed", "repo_stale", "cpu_fallback"})
_RECOVERED_SHARE = 0.9
"""Steps count as slow until their median falls below this share of the median at the start of the
slowdown, so that a median near the limit does not change the verdict with each step."""

_ENDED_BY = {
    "audit_passed": ("audit_failed",),
    "upload_succeeded": ("repo_stale",),
    "cpu_fallback": ("cpu_fallback",),
    "miner_started": ("loss_nan", "cpu_fallback"),
}


@dataclass
class Memory:
    """Events that stay in effect until another event clears them. Bounded."""

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

    reported: dict[str, str] = field(default_factory=dict)
    """Messages of events that still hold, by event. The status document may not show an event
    until a second later, and an alert sent in between must not contradict it."""

    def take(self, event: Event) -> None:
        """Update the memory from one event."""
        fields = event.fields
        for ended in _ENDED_BY.get(event.name, ()):
            self.reported.pop(ended, None)
        if event.name in _LASTING and fields.get("verdict", "certain") == "certain":
            self.reported[event.name] = message(event).partition("\n")[0]
        if event.name == "miner_restarting":
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
        elif event.name == "straggler":
            self.straggler = f"rank {event.rank} {fields.get('detail')}"
            self.straggler_rank = event.rank
        elif event.name == "straggler_cleared":
            self.straggler = self.straggler_rank = None
        elif event.name in ("gpu_fault", "gpu_recovered"):
            self._toggle(self.gpu_faults, f"GPU {fields.get('gpu')}", event, "gpu_fault")
        elif event.name in ("disk_full", "disk_stuck", "disk_recovered"):
            self._toggle(self.disks, str(fields.get("what")), event, "disk_full", "disk_stuck")

    def stepped(self, loss: float | None) -> None:
        """Record that training completed a step, so whatever was blocking it has cleared."""
        self.hang = self.restart = self.incident = None
        self.silent_s = 0.0
        if loss is not None and math.isfinite(loss):
            self.reported.pop("loss_nan", None)
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


def always(text: str) -> Action:
    """Return an action with the same text in every state."""
    return lambda status, memory: text


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
    problem, _ = split_advice(decision.reason)
    return f"the gate is blocking an upload that is due{age}: {problem}"


def _over_budget(status: StatusDocument, memory: Memory) -> str | None:
    costs = status.costs
    if costs.budget_status != "critical":
        return None
    return f"monitoring takes {costs.share_pct or 0.0:.1f}% of training time"


CONDITIONS: tuple[Condition, ...] = (
    Condition("crash_loop", STOPPED, _gave_up, after_crash_loop, "crash_loop"),
    Condition(
        "paused", STOPPED, _paused, always("resume it: `miner-guard ctl resume`"), "miner_paused"
    ),
    Condition("finished", STOPPED, _finished, always(""), "miner_finished"),
    Condition("done", STOPPED, _done, start_again, "guard_stopped"),
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
    Condition("loss_nan", NOT_EARNING, _loss_not_finite, restore, "loss_nan"),
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
    Condition("disk", DEGRADED, _disk, free_space, "disk_full"),
    Condition("due_but_blocked", DEGRADED, _due_but_blocked, satisfy_rule, "upload_blocked"),
    Condition("straggler", DEGRADED, _straggling, inspect_straggler, "straggler"),
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


UNWATCHED = "unwatched"
"""The state for time in which no guard was running."""

WORST_FIRST = (*STATES[:-1], UNWATCHED, STATES[-1])

CELL_S = 7200.0
CELLS = 84
"""A week of two-hour cells."""

BRIEF_SHARE = 0.05
"""A state that lasts less than this share of a cell does not colour it: a one-minute restart must
not turn an hour red."""

_UNCOUNTED_S = 60.0
"""Up to this many seconds without a verdict in a cell are ignored: they come from rounding and the
guard's startup."""


@dataclass(frozen=True)
class Strip:
    """Cells of equal length, oldest first, up to the present, and the share of time in each
    state."""

    start: float
    """Start of the first cell, seconds since 1970."""

    since: float
    """When the record starts; this falls in the first cell."""

    end: float
    """When the strip was made; this falls in the last cell."""

    cell_s: float
    cells: Sequence[str]
    """For each cell, the worst state that held for a noticeable part of it."""

    shares: dict[str, float]
    """Share of the time from `since` to `end`, by state, largest first; empty if nothing was
    recorded."""


class VerdictWeek:
    """Seconds spent in each state, for each cell of the last seven days. Bounded."""

    def __init__(
        self, stored: Mapping[str, Mapping[str, float]], start: float | None = None
    ) -> None:
        """`stored` and `start`: what an earlier object's `to_json` and `start` returned."""
        self._cells = {
            int(cell): {state: s for state, s in states.items() if state in WORST_FIRST}
            for cell, states in stored.items()
            if cell.isdecimal()
        }
        self._start = start

    @property
    def start(self) -> float | None:
        """Start of the record, in seconds since 1970; None if it is empty.

        If an older guard did not store the start, it is estimated by assuming that the first cell
        was recorded up to its end.
        """
        if not self._cells:
            return None
        first = min(self._cells)
        if self._start is not None:
            return max(self._start, first * CELL_S)
        return (first + 1) * CELL_S - min(CELL_S, sum(self._cells[first].values()))

    def to_json(self) -> dict[str, dict[str, float]]:
        """Return the seconds spent in each state, by cell; cells are numbered from 1970."""
        return {
            str(cell): {state: round(seconds) for state, seconds in states.items()}
            for cell, states in sorted(self._cells.items())
        }

    def add(self, state: str, start: float, end: float) -> None:
        """Record that `state` held from `start` to `end`, in seconds since 1970."""
        if self._start is None:
            self._start = start if self.start is None else self.start
        for cell, seconds in _parts(start, end):
            states = self._cells.setdefault(cell, {})
            states[state] = states.get(state, 0.0) + seconds
        newest = int(end // CELL_S)
        for cell in [cell for cell in self._cells if not newest - CELLS < cell <= newest]:
            del self._cells[cell]

    def correct(self, before: str, after: str, start: float, end: float) -> None:
        """Replace `before` with `after` from `start` to `end`: a hang, for example, is only
        detected some time after it begins."""
        for cell, seconds in _parts(start, end):
            states = self._cells.get(cell, {})
            moved = min(seconds, states.get(before, 0.0))
            if moved > 0:
                states[before] -= moved
                states[after] = states.get(after, 0.0) + moved

    def strip(self, now: float, cells: int = CELLS, current: str | None = None) -> Strip | None:
        """The strip from the record's start to `now`, in at most `cells` cells; None if there is no
        record. `current`, if worse, colours the last cell no matter how briefly it has held."""
        oldest = (int(now // CELL_S) - CELLS + 1) * CELL_S
        if self.start is None or (since := max(self.start, oldest)) >= now:
            return None
        first, last = int(since // CELL_S), int(now // CELL_S)
        width = next(n for n in range(1, CELLS + 1) if last - first < n * cells)
        groups = []
        for begin in range(first, last + 1, width):
            states = _sum([self._cells.get(begin + n, {}) for n in range(width)])
            end = min(now, (begin + width) * CELL_S)
            groups.append(_with_unwatched(states, end - max(since, begin * CELL_S)))
        totals = _sum(groups)
        whole = sum(totals.values())
        ordered = sorted(totals.items(), key=lambda item: -item[1])
        colours = [_worst(group, width * CELL_S) for group in groups]
        if current in WORST_FIRST:
            known = [colours[-1]] if groups[-1] else []
            colours[-1] = min([*known, current], key=WORST_FIRST.index)
        shares = {state: seconds / whole for state, seconds in ordered if seconds > 0}
        return Strip(first * CELL_S, since, now, width * CELL_S, colours, shares)


def _parts(start: float, end: float) -> list[tuple[int, float]]:
    """The cells between two times, with the seconds in each; at most a week of them."""
    first, last = int(start // CELL_S), int(end // CELL_S)
    cells = range(max(first, last - CELLS), last + 1)
    return [
        (cell, seconds)
        for cell in cells
        if (seconds := min(end, (cell + 1) * CELL_S) - max(start, cell * CELL_S)) > 0
    ]


def _sum(cells: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for states in cells:
        for state, seconds in states.items():
            total[state] = total.get(state, 0.0) + seconds
    return total


def _with_unwatched(states: Mapping[str, float], elapsed_s: float) -> dict[str, float]:
    """Seconds in each state, including time without a verdict."""
    missing = elapsed_s - sum(states.values())
    return {**states, UNWATCHED: missing} if missing >= _UNCOUNTED_S else dict(states)


def _worst(states: Mapping[str, float], width_s: float) -> str:
    """The worst state in a cell, ignoring brief states unless all are brief. Unknown is not bad
    news: it only colours a cell in which no other state lasted longer."""
    held = {state for state, seconds in states.items() if seconds > 0}
    lasting = {state for state in held if states[state] >= BRIEF_SHARE * width_s} or held
    if max(lasting, key=lambda state: states[state], default=UNKNOWN) != UNKNOWN:
        lasting -= {UNKNOWN}
    return min(lasting, key=WORST_FIRST.index, default=UNWATCHED)


SILENT_S = 60.0
"""If the status is older than this, the guard is gone or wedged, because it writes once a
second."""

FIND_THE_GUARD = (
    "on the miner's machine, check whether the guard is running: `miner-guard status`, `pm2 "
    "status` or `systemctl status miner-guard`"
)
"""The next step if the guard itself is silent."""

_DEGRADED = {"yes": "STILL EARNING, degraded"}
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
    more = f" (more: `miner-guard explain {verdict.event}`)" if verdict.event else ""
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
        return _DEGRADED.get(verdict.earns, "EARNING NOT PROVEN, degraded")
    return str(verdict.state).upper()


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
    """Whether the miner is earning: `yes`, `no` or `unknown`."""

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
    """The verdict if no condition holds: earning if the chain or a validator's rules show it."""
    earns, evidence = _evidence(status)
    cause = _progress(status)
    if earns == "yes":
        return RunVerdict(EARNING, cause, "", None, "measured", "audited", earns)
    cause = f"{cause}; {evidence}"
    repo = status.uploads.repo
    if repo.reason == NO_REPO:
        step = "set [repo] in guard.toml; `miner-guard config --changed` shows it"
    elif repo.revision is None:
        step = "wait for the first upload; `miner-guard top` shows what it is waiting for"
    else:
        step = "check the published files: `miner-guard audit`"
    return RunVerdict(UNKNOWN, cause, step, None, "unknown", "not_audited", earns)


def _evidence(status: StatusDocument) -> tuple[str, str]:
    """Return whether the miner earns (see `RunVerdict.earns`), and what shows it: the chain, or an
    audit that saw everything a validator needs. A verified upload alone proves nothing."""
    chain, uploads = status.chain, status.uploads
    if chain.incentive:
        return "yes", f"the chain gives the hotkey an incentive of {chain.incentive:.4f}"
    if uploads.network is not None:
        return "unknown", f"earning is not proven: {uploads.network}"
    if uploads.audit is not None and uploads.audit.outcome == "accepted":
        return "yes", "the last audit accepted the published files"
    if uploads.audit is not None and uploads.audit.outcome == "unknown":
        why = f"the last audit could not tell: {uploads.audit.detail}"
    elif uploads.upload is not None and uploads.upload.outcome == "verified":
        why = "the last upload was verified, but no audit has judged it"
    else:
        why = uploads.repo.reason or "nothing has been uploaded yet"
    return "unknown", f"earning is not proven: {why}"


def _progress(status: StatusDocument) -> str:
    steps = status.steps
    loss = steps.loss
    words = f"training at outer step {or_unknown(steps.outer_step)}, inner step "
    words += or_unknown(steps.inner_step)
    return words + (f", loss {loss:.2f}" if isinstance(loss, (int, float)) else "")


_SETTLED_S = 5.0
"""A condition must hold this long before the verdict changes: shorter conditions are reported by
other events."""

_UNWATCHED_S = 600.0
"""If two ticks are further apart than this (the host was suspended), the time in between
counts as unwatched."""

_REPORTED = ("state", "since", "cause", "next_step", "confidence", "earns")


class VerdictMonitor(Monitor):
    """Judges the status document at each tick and reports changes in the verdict."""

    name = "verdict"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._memory = Memory()
        self._document = LastRead(StatusDocument)
        self._current: RunVerdict | None = None
        self._since = context.clock.wall()
        self._candidate: tuple[str, float] | None = None
        """A condition that may become the verdict, and the monotonic time when it began."""

        before = read_status(context.state)
        verdict = before.verdict if before is not None else None
        self._week = VerdictWeek(*((verdict.week, verdict.week_start) if verdict else ({},)))
        self._counted_at = context.clock.monotonic()

    def on_event(self, event: Event) -> Iterable[Event]:
        self._memory.take(event)
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Event]:
        self._memory.stepped(steps[-1].loss)
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        self._count(now)
        status = self.context.status()
        if not status:
            return ()
        verdict = judge(self._document.of(status), self._memory)
        if self._current is not None and verdict.key == self._current.key:
            # Update the numbers in the sentence; only a different condition counts as a change.
            self._current, self._candidate = verdict, None
            return ()
        if self._candidate is None or self._candidate[0] != verdict.key:
            self._candidate = (verdict.key, now)
        held_s = now - self._candidate[1]
        if held_s < _SETTLED_S:
            return ()
        return [self._change(verdict, held_s)]

    def on_stop(self) -> Iterable[Event]:
        """The final verdict: nothing is training here anymore."""
        self._count(self.context.clock.monotonic())
        verdict = judge(
            replace(StatusDocument.from_json(self.context.status()), state="done"), self._memory
        )
        return [self._change(verdict)]

    def _count(self, now: float) -> None:
        """Add the time since the last call to the week's totals."""
        passed_s, self._counted_at = now - self._counted_at, now
        if passed_s <= _UNWATCHED_S:
            wall, state = self.context.clock.wall(), UNKNOWN
            if self._current is not None:
                state = self._current.state
            self._week.add(state, wall - passed_s, wall)

    def _change(self, verdict: RunVerdict, held_s: float = 0.0) -> Event:
        """Adopt a verdict whose condition has held for `held_s` seconds. A hang counts from
        the last step before it."""
        previous = self._current
        self._current, self._candidate = verdict, None
        if previous is None or previous.state != verdict.state:
            wall = self.context.clock.wall()
            self._since = wall - held_s - self._memory.silent_s
            before = UNKNOWN if previous is None else previous.state
            self._week.correct(before, verdict.state, self._since, wall)
        shown = self._status()
        return make_finding(
            "verdict_changed",
            headline=headline(shown),
            previous=None if previous is None else previous.state,
            **{name: getattr(shown, name) for name in _REPORTED},
        )

    def _status(self) -> VerdictStatus:
        if self._current is None:
            status = VerdictStatus(
                state=UNKNOWN, cause="the guard has just started", earns="unknown"
            )
        else:
            status = self._current.status(iso_utc(self._since))
        return replace(status, week=self._week.to_json(), week_start=self._week.start)

    def snapshot(self) -> Mapping[str, Any]:
        return self._status().to_json()
