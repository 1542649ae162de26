"""State: the one judgement of a run. Four axes (life, health, earning, freshness) follow from the
status document and the events that still hold; `state_words` puts them into words."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional

from miner_guard.config import HangSettings
from miner_guard.exits import UNAVAILABLE
from miner_guard.rank.layout import Now, StepRecord
from miner_guard.record.events import Event, event
from miner_guard.record.redaction import public
from miner_guard.record.status_document import (
    NO_JUDGE,
    NO_REPO,
    LastUpload,
    RunState,
    StatusDocument,
    StepsStatus,
    read_status,
)
from miner_guard.record.store import RunReader
from miner_guard.record.words import counted, or_unknown, rank_list, shortened
from miner_guard.system.clock import iso_utc, parse_iso_utc
from miner_guard.watch.base import Context, Launch, Monitor
from miner_guard.watch.hang import FACTOR
from miner_guard.watch.incident import latest
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
    UNWATCHED,
    YELLOW,
    YES,
    Changes,
    earning_words,
    first_words,
    headline,
    span,
    with_change,
)

_STEPPING = frozenset({"", "data", "forward", "backward", "optimizer", "collective"})
"""Phases that take about the same time in every step; any other phase may last minutes."""

_RECOVERED_SHARE = 0.9
"""Steps count as slow until their median falls below this share of the median at the start of the
slowdown, so that a median near the limit does not change the state with each step."""


_MAX_HELD = 200


@dataclass
class Memory:
    """The events that hold until another event or a step ends them. Bounded."""

    limits: HangSettings = field(default_factory=HangSettings)
    launch_at: float | None = None
    """When the last `miner_restarting` starts the miner again, in seconds since 1970."""

    slow_from_s: float | None = None
    """The median step time when steps became slow; None while steps are not slow."""

    paused_s: float = 0.0
    """How long after the last step a phase lasted that belongs to no step, such as an AllReduce."""

    _held: dict[str, Event] = field(default_factory=dict)
    """By name; of GPUs and files, one each."""

    def of(self, name: str) -> Mapping[str, Any]:
        """The fields of the event of this name that holds; empty if none does."""
        return self._held[name].fields if name in self._held else {}

    def all_of(self, *names: str) -> list[Event]:
        """Every event of these names that holds, in the order of GPUs or files."""
        return [event for _, event in sorted(self._held.items()) if event.name in names]

    def take(self, event: Event, wall: float | None = None) -> None:
        """Update the memory from one event at `wall`, in seconds since 1970; at level info, it ends
        what it names."""
        fields, over, key = event.fields, event.level == "info", event.name
        if key == "gpu_fault":
            key = f"gpu {fields.get('gpu')}"
        elif key in ("disk_full", "disk_stuck"):
            key = f"disk {fields.get('what')}"
        match event.name:
            case "incident" | "straggler" | "gpu_fault" | "disk_full" | "disk_stuck" if over:
                self._held.pop(key, None)
                return
            case "checkpoint" if not over or "loss_nan" in self._held:
                # Only what was saved before the loss became NaN is worth going back to.
                return
            case "preflight" if fields.get("outcome") != "critical" or key in self._held:
                # The checks are in the order in which one needs the other.
                return
            case "miner_restarting":
                self.launch_at = None if wall is None else wall + float(fields.get("wait_s") or 0.0)
            case "hang_detected":
                self._held.pop("stack_dump", None)
            case "stack_dump" if over:
                return
        if key in self._held or len(self._held) < _MAX_HELD:
            self._held[key] = event

    def _forget(self, *names: str) -> None:
        for name in names:
            self._held.pop(name, None)

    def launched(self) -> None:
        """Record a new launch: its losses and ranks are other ones."""
        self._forget("loss_nan", "straggler")

    def stepped(self, rank: int, loss: float | None) -> None:
        """Record that a rank completed a step, so whatever was blocking it has cleared."""
        self._forget("hang_detected", "miner_restarting", "incident", "miner_exited")
        finite = loss is not None and math.isfinite(loss)
        if finite and rank in (self.of("loss_nan").get("ranks") or [rank]):
            self._forget("loss_nan")

    def watch(self, steps: StepsStatus) -> None:
        """Update the memory from the latest step times."""
        age_s, median_s = steps.last_step_age_s or 0.0, steps.p50_s
        if steps.phase not in _STEPPING:
            self.paused_s = age_s
        elif age_s < self.paused_s:
            self.paused_s = 0.0
        if median_s is None:
            self.slow_from_s = None
        elif steps.grade == "bad":
            self.slow_from_s = min(self.slow_from_s or median_s, median_s)
        elif self.slow_from_s is not None and median_s < _RECOVERED_SHARE * self.slow_from_s:
            self.slow_from_s = None


# --- what a next step names ---


def _start(status: StatusDocument) -> str:
    """The command that starts the guard again."""
    return f"`{status.start_command or 'miner-guard run'}`"


def _gpu_of(status: StatusDocument, rank: int | None) -> int | None:
    """NVML's index of the GPU that a rank reported in its diagnosis; None if unknown.

    Ranks are matched by GPU UUID: CUDA's numbering depends on CUDA_VISIBLE_DEVICES.
    """
    uuid = next((r.get("uuid") for r in status.diagnosis.ranks if r.get("rank") == rank), None)
    rows = (row for row in status.health.gpus.gpus if uuid and row.get("uuid") == uuid)
    return next((row.get("index") for row in rows), None)


def split_advice(reason: str | None) -> tuple[str, str]:
    """The problem and the advice in a validator rule's sentence, such as `base outer_step (60) <
    network (61). Reload the global state`; the advice is empty if the rule gives none."""
    problem, _, advice = (reason or "").partition(". ")
    return problem.rstrip("."), f"{advice[:1].lower()}{advice[1:]}".rstrip(".")


def _setting(status: StatusDocument, setting: str) -> str:
    """A setting and the file to write it to."""
    return f"{setting} in {status.settings_file or 'guard.toml'}"


def _last_lines(memory: Memory) -> str:
    """The command that shows what the miner printed before the last incident, with the whole
    traceback."""
    folder = memory.of("incident").get("evidence")
    return f"`tail -n 30 {shlex.quote(f'{folder}/output.log')}`" if folder else _SEE_ERRORS


def _fix_of(memory: Memory) -> str:
    """The last incident's fix, without a full stop; empty if there is none."""
    return str(memory.of("incident").get("fix") or "").rstrip(".")


def _lower(sentence: str) -> str:
    """The sentence as it continues another one; `CUDA` and `PyTorch` keep their capitals."""
    first = sentence.partition(" ")[0]
    return (
        sentence if first[1:] != first[1:].lower() else f"{first.lower()}{sentence[len(first) :]}"
    )


def _excerpt_of(memory: Memory) -> str:
    """The last line that shows the last incident, in brackets; empty if there is none. The state
    goes into alerts and pages, so of the miner's words only what may leave the machine."""
    rows = str(memory.of("incident").get("excerpt") or "").split("\n")
    excerpt = public(next((row.strip() for row in reversed(rows) if row.strip()), ""))
    return f" ({shortened(excerpt, _MAX_EXCERPT)})" if excerpt else ""


_MAX_EXCERPT = 120
_SEE_ERRORS = "`miner-guard logs --level error -n 5`"


# --- the conditions ---

Answer = Optional[tuple[str, str]]
"""If a condition holds, its cause and the next step, which is empty if there is nothing to do."""

Judge = Callable[[StatusDocument, Memory], Answer]


@dataclass(frozen=True)
class Condition:
    """One condition that can decide the state."""

    key: str
    life: str
    colour: str
    event: str | None
    judge: Judge
    endangers: bool
    """Whether it keeps a training miner from publishing what validators accept."""


CONDITIONS: list[Condition] = []
"""In the order of judgement: what ends training, what makes it useless, what slows it."""


def _condition(
    key: str, life: str, colour: str, event: str | None = None, *, endangers: bool = False
) -> Callable[[Judge], Judge]:
    """List a judge in `CONDITIONS`, after those above it."""

    def listed(judge: Judge) -> Judge:
        CONDITIONS.append(Condition(key, life, colour, event, judge, endangers))
        return judge

    return listed


@_condition("crash_loop", STOPPED, RED, "crash_loop")
def _gave_up(status: StatusDocument, memory: Memory) -> Answer:
    loop = memory.of("crash_loop")
    if not loop:
        return None
    # The fix is part of the next step.
    words = str(loop.get("detail")).partition(". Fix: ")[0].rstrip(".") + _excerpt_of(memory)
    fix = _fix_of(memory)
    step = f"{_lower(fix)}; " if fix else "fix what ended it; "
    step += f"the miner's last lines: {_last_lines(memory)}; then start the guard: {_start(status)}"
    return f"crash loop: {words}", step


@_condition("refused", REFUSED, RED, "preflight")
def _refused(status: StatusDocument, memory: Memory) -> Answer:
    if status.exit_code != UNAVAILABLE or not status.reason:
        return None
    check, first = memory.of("preflight"), ""
    if check:
        first = f"first {_lower(str(check.get('next_step')))} ({check.get('check')}); then "
    step = f"{first}see what is left with `miner-guard doctor`; then start the guard: "
    return status.reason, step + _start(status)


@_condition("finished", FINISHED, GREY, "miner_finished")
def _finished(status: StatusDocument, memory: Memory) -> Answer:
    finished = status.last_exit is not None and status.last_exit.finished
    return ("the miner finished its work", "") if status.state == "done" and finished else None


@_condition("failed", STOPPED, RED, "guard_stopped")
def _failed(status: StatusDocument, memory: Memory) -> Answer:
    if status.state != "done" or not status.exit_code or not status.reason:
        return None
    return status.reason, f"start it again: {_start(status)}"


@_condition("done", STOPPED, GREY, "guard_stopped")
def _done(status: StatusDocument, memory: Memory) -> Answer:
    step, why = f"start it again: {_start(status)}", f" ({status.reason})" if status.reason else ""
    if status.state == "done":
        return f"the guard stopped the miner{why}", step
    requested = not memory.of("miner_restarting") and not memory.of("hang_detected")
    stopping = status.state == "stopping" and requested
    return ("the guard is stopping the miner", step) if stopping else None


@_condition("paused", STOPPED, GREY, "miner_paused")
def _paused(status: StatusDocument, memory: Memory) -> Answer:
    paused = "an operator paused the miner", "resume it: `miner-guard ctl resume`"
    return paused if status.state == "paused" else None


@_condition("restarting", RESTARTING, YELLOW, "miner_restarting")
def _restarting(status: StatusDocument, memory: Memory) -> Answer:
    if status.state == "running" and status.steps.total_steps is None:
        return None
    waits = status.state == "waiting" and memory.launch_at is not None
    when = f" at {iso_utc(memory.launch_at or 0.0)[11:19]} UTC" if waits else ""
    sooner = " (sooner: `miner-guard ctl restart`)" if waits else ""
    again = f"if it fails again: {_lower(fix)}; " if (fix := _fix_of(memory)) else ""
    step = f"nothing yet: the guard restarts the miner{when}{sooner}; {again}"
    step += f"the miner's last lines: {_last_lines(memory)}"
    restart, hang = memory.of("miner_restarting"), memory.of("hang_detected").get("detail")
    if not restart:
        if status.state not in ("ending", "waiting") or hang:
            return None
        return memory.of("miner_exited").get("how") or "the miner has ended", step
    attempt = f"attempt {restart.get('attempt')} of {restart.get('max_restarts')}"
    why = f"hung: {hang}" if hang else f"{restart.get('cause')}{_excerpt_of(memory)}"
    return f"{why}; restarting, {attempt}", step


@_condition("hang", HUNG, RED, "hang_detected")
def _hanging(status: StatusDocument, memory: Memory) -> Answer:
    hang = status.hang.hang or memory.of("hang_detected").get("detail")
    age_s, folder = status.steps.last_step_age_s, memory.of("stack_dump").get("path")
    if not hang:
        return None
    if lasting := _client(status) if age_s is None else f"; no step for {span(age_s)}":
        # The detector's time is that of its discovery.
        hang = f"{_LASTING.sub('', hang)}{lasting}"
    where = f"in {folder or 'the folder that `miner-guard logs --event stack_dump -n 1` names'}"
    match memory.limits.action:
        case "restart":
            return hang, f"nothing yet: the guard restarts the miner; its stacks: {where}"
        case "stop":
            return hang, f"the guard stops the miner; read its stacks {where}"
    lets = _setting(status, '[hang] action = "restart"')
    step = f"read its stacks {where}, then `miner-guard ctl restart`; {lets} lets the guard do it"
    return hang, memory.of("hang_detected").get("advice") or step


_LASTING = re.compile(r" for \d+s\b")


@_condition("preflight", STARTING, GREY)
def _preflight(status: StatusDocument, memory: Memory) -> Answer:
    return ("the preflight is checking this machine", "") if status.state == "starting" else None


@_condition("loss_nan", TRAINING, RED, "loss_nan", endangers=True)
def _loss_not_finite(status: StatusDocument, memory: Memory) -> Answer:
    steps, nan, saved = status.steps, memory.of("loss_nan"), memory.of("checkpoint")
    step = (
        "`miner-guard ctl restart`: the miner starts again from what its own code loads (it told "
        "the guard of no checkpoint); if the loss becomes NaN again, lower the learning rate first"
    )
    if saved:
        step = (
            "`miner-guard ctl pause`; let the miner load the last checkpoint from before the NaN, "
            f"`{saved.get('path')}`; then `miner-guard ctl resume`"
        )
    if not nan:
        if steps.loss not in ("NaN", "Infinity", "-Infinity"):
            return None
        return f"loss is {steps.loss} at step {or_unknown(steps.inner_step)}", step
    word = steps.loss if isinstance(steps.loss, str) else nan.get("loss") or "NaN"
    if nan.get("step") is None:
        return f"loss is {word}", step
    of = "" if nan.get("outer_step") is None else f" of outer step {nan['outer_step']}"
    return f"loss has been {word} since step {nan['step']}{of}", step


@_condition("cpu_fallback", TRAINING, RED, "cpu_fallback", endangers=True)
def _on_cpu(status: StatusDocument, memory: Memory) -> Answer:
    on_cpu = [r for r, row in status.ranks.cpu_fallback.items() if row.verdict == "certain"]
    if not on_cpu:
        return None
    where, gpus = rank_list(int(rank) for rank in on_cpu if rank.isdecimal()), status.health.gpus
    none = gpus.state in ("absent", "ok") and not gpus.gpus
    why = f"; {status.health.without_gpu()}" if none else ""
    return f"the model is running on the CPU on {where}{why}", (
        "`miner-guard ctl pause`; `miner-guard doctor` shows the CUDA problem; "
        "once it is fixed, `miner-guard ctl resume`"
    )


@_condition("unpaid", TRAINING, RED, "chain_status")
def _unpaid(status: StatusDocument, memory: Memory) -> Answer:
    if status.chain.unpaid is None:
        return None
    step = "check the subnet before you train on: `btcli subnet show`"
    return f"the network pays no miner: {status.chain.unpaid}", step


@_condition("unregistered", TRAINING, RED, "chain_status")
def _unregistered(status: StatusDocument, memory: Memory) -> Answer:
    if status.chain.registered is not False:
        return None
    step = "register the hotkey again: `btcli subnet register`, then `miner-guard ctl restart`"
    return "the hotkey is not registered", step


@_condition("rejected", TRAINING, RED, "audit_failed")
def _rejected(status: StatusDocument, memory: Memory) -> Answer:
    audit = status.uploads.audit
    if audit is None or audit.outcome != "rejected":
        return None
    step = "see each failed rule with `miner-guard audit`, fix the cause, then upload again"
    return f"validators would reject the published files: {audit.detail}", step


@_condition("stale", TRAINING, RED, "repo_stale")
def _stale(status: StatusDocument, memory: Memory) -> Answer:
    if not status.uploads.repo.stale:
        return None
    push, decision, age = status.uploads.upload, status.uploads.decision, _age_words(status)
    logs = "`miner-guard logs --event upload_failed --event upload_unverified -n 3`"
    steps = status.steps
    publish = (
        "start the upload in the miner's own code, because the guard never uploads (outer step "
        f"{or_unknown(steps.outer_step)}, inner step {or_unknown(steps.inner_step)}); then check "
        "it: `miner-guard audit`"
    )
    if (block := _block(status)) is not None:
        return f"{age}; the gate blocks uploads: {block[0]}", block[1]
    if push is not None and push.outcome in _NOT_SENT:
        return f"{age}; the last upload failed{_error_of(push)}", f"see why: {logs}; {publish}"
    if push is not None:
        return f"{age}; the last upload was {push.outcome}", f"{publish}; see the uploads: {logs}"
    if decision is None:
        return f"{age}; no upload has been tried since the guard started", publish
    return f"{age}; the gate allows an upload, but the miner has not made one", publish


def _age_words(status: StatusDocument) -> str:
    repo = status.uploads.repo
    if status.state == "done" and status.updated and None not in (repo.age_s, repo.limit_s):
        # Nobody updates this sentence after the guard's end.
        until = parse_iso_utc(status.updated) + (repo.limit_s or 0.0) - (repo.age_s or 0.0)
        old = "have been too old since" if repo.stale else "are too old from"
        return f"the published files {old} {iso_utc(until)[:16].replace('T', ' ')} UTC on"
    limit = "" if repo.limit_s is None else f" (limit {repo.limit_s:.0f}s)"
    return f"the published files are {or_unknown(repo.age_s, '.0f', 's')} old{limit}"


@_condition("late", STARTING, YELLOW, "no_step_yet")
def _late(status: StatusDocument, memory: Memory) -> Answer:
    allowed = memory.limits.allowances.get(status.steps.phase or "", 0.0)
    limit = max(memory.limits.first_step_s, allowed)
    try:
        waited_s = parse_iso_utc(str(status.updated)) - parse_iso_utc(str(status.started))
    except ValueError:
        return None
    if status.steps.total_steps is not None or waited_s <= limit:
        return None
    step = "see what it does: `miner-guard logs --event no_step_yet -n 1`"
    return f"no first step within {waited_s:.0f} s (limit {limit:.0f} s){_client(status)}", step


def _client(status: StatusDocument) -> str:
    """The state that the lines of a network's client name, and its age; empty while it trains."""
    client = status.log_only
    if not client.phase or client.phase_s is None:
        return ""
    words = f"; {client.phase} for {span(client.phase_s)}"
    if client.phase == "queued" and client.position is not None:
        back = f", moved back {counted(client.returns, 'time')}" if client.returns else ""
        words += f" at position {client.position}{back}"
    return words


@_condition("no_step", STARTING, GREY)
def _no_step(status: StatusDocument, memory: Memory) -> Answer:
    if status.steps.total_steps is not None:
        return None
    phase = status.steps.phase or ""
    cause = _client(status) or (f"; the miner is in phase {phase}" if phase else "")
    cause = f"no step yet{cause}"
    if (allowed_s := memory.limits.allowances.get(phase)) is not None:
        longest = max(allowed_s, memory.limits.first_step_s)
        return cause, f"wait; this phase may last {span(longest)}"
    limit, logs = span(memory.limits.first_step_s), "`miner-guard logs --event no_step_yet`"
    return cause, f"wait for the first step; if none comes within {limit} of the launch: {logs}"


@_condition("silent", HUNG, RED)
def _silent(status: StatusDocument, memory: Memory) -> Answer:
    """A miner whose ranks report nothing has printed no step for as long as a hang lasts."""
    age = status.steps.last_step_age_s
    if status.hang.watching or status.state != "running" or age is None:
        return None
    limit = max(memory.limits.min_s, FACTOR * (status.steps.max_s or 0.0))
    if age <= limit:
        return None
    return f"no step for {age:.0f} s (limit {limit:.0f} s)", f"see its last lines: {_SEE_ERRORS}"


_QUIET_S = 20.0
_QUIET_FACTOR = 4.0
"""A step is overdue once it has taken longer than both `_QUIET_S` seconds and this multiple of the
longest step so far. Most pauses in a healthy run are shorter."""


@_condition("overdue", TRAINING, YELLOW, "hang_detected", endangers=True)
def _overdue(status: StatusDocument, memory: Memory) -> Answer:
    """A step takes far longer than any before it, and the guard has not called it a hang yet."""
    steps, limit = status.steps, status.hang.limit_s
    age, slowest = steps.last_step_age_s, steps.max_s
    if age is None or slowest is None or steps.phase not in _STEPPING:
        return None
    # What lasted before this step began is no part of it.
    in_step_s = age - memory.paused_s
    if status.state != "running" or in_step_s < max(_QUIET_S, _QUIET_FACTOR * slowest):
        return None
    until = f"; the guard reports a hang after {limit:.0f} s" if limit is not None else ""
    step = "wait for the hang detector, which names the rank: `miner-guard logs -f`"
    return f"no step for {age:.0f} s (the longest took {slowest:.1f} s){until}", step


@_condition("gpu_fault", TRAINING, YELLOW, "gpu_fault")
def _gpu_fault(status: StatusDocument, memory: Memory) -> Answer:
    found = [event.fields for event in memory.all_of("gpu_fault")]
    faults = "; ".join(f"GPU {fault.get('gpu')} {fault.get('what')}" for fault in found)
    return (faults, "check the GPUs: `miner-guard doctor`") if faults else None


@_condition("disk", TRAINING, YELLOW, "disk_full")
def _disk(status: StatusDocument, memory: Memory) -> Answer:
    stuck, failed = memory.all_of("disk_stuck"), memory.all_of("disk_full")
    if not stuck and not failed:
        return None
    # The words of the kernel, of SQLite and of a quota.
    full = any(re.search("space|full|quota", str(e.fields.get("reason"))) for e in failed)
    disk, place = "the disk of the state directory", status.state_dir or "the state directory"
    df = f"`df -h {shlex.quote(status.state_dir or '.')}`"
    if full:
        how = f"({df}), at worst by deleting its guard.jsonl: the guard then resumes"
        return f"{disk} is full", f"free up space on the disk that holds {place} {how}"
    step = f"see what the kernel says of the disk that holds {place} ({df}): `dmesg | tail`"
    return f"{disk} is not responding", step


@_condition("due_but_blocked", TRAINING, YELLOW, "upload_blocked", endangers=True)
def _due_but_blocked(status: StatusDocument, memory: Memory) -> Answer:
    block = _block(status)
    if block is None or not status.uploads.repo.due:
        return None
    return f"the gate is blocking an upload that is due: {block[0]}", block[1]


_TOO_EARLY = re.compile(r"inner_step \(\d+\) < minimum \((\d+)\)")


def _block(status: StatusDocument) -> Answer:
    """What the gate's last decision has against an upload; None if it allowed one, or if the miner
    has come to the step that it demanded."""
    decision, repo, steps = status.uploads.decision, status.uploads.repo, status.steps
    if decision is None or decision.allowed is not False:
        return None
    problem, advice = split_advice(decision.reason)
    if early := _TOO_EARLY.match(problem):
        left = int(early[1]) - (steps.inner_step or 0)
        if left <= 0:
            return None
        if decision.note:
            problem = decision.note.partition(": ")[0]
        eta_s = steps.eta_upload_s
        if eta_s is None and steps.p50_s is not None:
            eta_s = left * steps.p50_s
        when = "" if eta_s is None else f", in about {span(eta_s)}"
        fresh_s = None if repo.age_s is None or repo.limit_s is None else repo.limit_s - repo.age_s
        if eta_s is not None and fresh_s is not None and 0 < fresh_s < eta_s:
            lower = f"lower {_setting(status, '[gate] min_inner_step')} if validators accept less"
            when += f"; the published files are too old in {span(fresh_s)}: {lower}"
        advice = f"wait for inner step {early[1]}{when}"
    rules = "`miner-guard logs --event upload_blocked -n 1 --json`"
    step = f"{advice}; to see each rule and its limit: {rules}" if advice else f"see each: {rules}"
    return problem, step


@_condition("straggler", TRAINING, YELLOW, "straggler")
def _straggling(status: StatusDocument, memory: Memory) -> Answer:
    straggler = next(iter(memory.all_of("straggler")), None)
    if straggler is None:
        return None
    rank, host = straggler.rank, f" on host {status.host}" if status.host else ""
    process = status.rank_processes.get(str(rank))
    place, query = f"its GPU{host}", "`nvidia-smi -q -d CLOCK,TEMPERATURE`"
    remedy = "cool it if it is hot or throttled, or leave it out"
    if (gpu := _gpu_of(status, rank)) is not None:
        place, query = f"GPU {gpu}{host}", f"`nvidia-smi -i {gpu} -q -d CLOCK,TEMPERATURE`"
    elif process is not None and status.health.gpus.state == "absent":
        place, query = f"the CPU{host}, as process {process.pid}", "`top`"
        remedy = "end other programs that take its CPU"
    elif process is not None:
        place = f"the GPU of local rank {process.local_rank}{host}"
    all_ranks = "the ranks' times: `miner-guard logs --event timing_breakdown`"
    step = f"rank {rank} runs on {place}; check it with {query}: {remedy}; {all_ranks}"
    return f"rank {rank} {straggler.fields.get('detail')}", step


@_condition("slow", TRAINING, YELLOW, "slow_step")
def _slow(status: StatusDocument, memory: Memory) -> Answer:
    p50 = status.steps.p50_s
    if p50 is None or memory.slow_from_s is None:
        return None
    logs = "`miner-guard logs --event timing_breakdown -n 5`"
    return f"steps take {p50:.0f} s", f"see where the time goes: {logs}"


@_condition("over_budget", TRAINING, YELLOW, "monitoring_over_budget")
def _over_budget(status: StatusDocument, memory: Memory) -> Answer:
    costs = status.costs
    if costs.budget_status != "critical":
        return None
    words = f"monitoring takes {costs.share_pct or 0.0:.1f}% of training time"
    return words, "see the most expensive operation: `miner-guard costs`"


@_condition("well", TRAINING, GREEN)
def _well(status: StatusDocument, memory: Memory) -> Answer:
    """What holds if nothing above does."""
    earning, _ = judge_earning(status, endangered=False)
    if earning is not None and (block := _block(status)) is not None:
        return f"{_progress(status)}; the gate blocks uploads: {block[0]}", block[1]
    unproven = _unproven(status) if earning == NOT_PROVEN else None
    return _progress(status), "" if unproven is None else unproven[1]


# --- the judgement ---

_OF_EARNING = ("unpaid", "unregistered", "rejected", "stale")
"""Conditions whose cause is already why the miner does not earn."""


def judge(status: StatusDocument, memory: Memory) -> RunState:
    """The state that this status document and the events that hold amount to."""
    memory.watch(status.steps)
    answers = ((each, each.judge(status, memory)) for each in CONDITIONS)
    condition, (cause, step) = next((each, found) for each, found in answers if found is not None)
    endangered = condition.endangers or condition.life != TRAINING
    earning, why = judge_earning(status, endangered=endangered)
    colour = RED if earning == NO and condition.life == TRAINING else condition.colour
    return RunState(
        life=condition.life,
        stage=_stage(condition, status),
        health=HEALTH.get(colour, "well"),
        earning=earning,
        earning_why="" if condition.key in _OF_EARNING else why,
        colour=colour,
        cause=cause,
        next_step=step,
        event=condition.event,
        key=condition.key,
    )


_ENDING = {
    "stopping": "stopping its processes",
    "ending": "ending its processes",
    "waiting": "waiting for the next launch",
    "running": "waiting for the first step",
}
"""The stage of a restart, by the supervisor's state."""


def _stage(condition: Condition, status: StatusDocument) -> str | None:
    if condition.life == STARTING:
        phase = status.steps.phase
        waiting = "waiting for the first step" + (f" ({phase})" if phase else "")
        return "preflight" if condition.key == "preflight" else waiting
    return _ENDING.get(str(status.state)) if condition.life == RESTARTING else None


def judge_earning(status: StatusDocument, *, endangered: bool) -> tuple[str | None, str]:
    """Whether the miner earns, and what shows it; None for a miner that publishes nothing. What
    validators have earns until it is too old, whatever happens to the miner; `endangered` says that
    nothing newer follows."""
    chain, uploads, repo = status.chain, status.uploads, status.uploads.repo
    watched = repo.reason not in (NO_REPO, NO_JUDGE) and (
        repo.reason or repo.empty or repo.age_s is not None or repo.limit_s is not None
    )
    on_chain = chain.registered is False or chain.incentive or chain.unpaid or uploads.network
    if not (watched or on_chain or uploads.audit or uploads.upload or uploads.decision):
        unset = f"; {_setting(status, 'no [repo] kind')}" if repo.reason == NO_REPO else ""
        return None, NO_JUDGE if repo.reason == NO_JUDGE else f"nothing is published{unset}"
    for trouble in (_unpaid, _unregistered, _rejected, _stale):
        if (answer := trouble(status, Memory())) is not None:
            return NO, answer[0]
    if (unproven := _unproven(status)) is not None:
        return NOT_PROVEN, unproven[0]
    if endangered:
        return AT_RISK, "" if repo.age_s is None else _age_words(status)
    if chain.incentive:
        return YES, f"validators set an incentive of {chain.incentive:.4f}"
    return YES, "the last audit accepted the published files"


_AUDIT_IT = "see what validators find: `miner-guard audit`"
_NOT_SENT = ("failed", "refuted")
"""Outcomes of an upload that did not reach the repo."""


def _unproven(status: StatusDocument) -> Answer:
    """Why nothing shows that the miner earns, and the next step. None if the chain shows it, or an
    audit that saw everything a validator needs. A verified upload alone proves nothing."""
    uploads = status.uploads
    audit, push, repo = uploads.audit, uploads.upload, uploads.repo
    if status.chain.incentive:
        return None
    if uploads.network is not None:
        return uploads.network, _AUDIT_IT
    if audit is not None and audit.outcome == "accepted":
        return None
    if push is not None and push.outcome in _NOT_SENT:
        logs = "`miner-guard logs --event upload_failed -n 1`"
        return f"the last upload failed{_error_of(push)}", f"see why, then fix it: {logs}"
    if repo.reason == NO_REPO:
        step = f"set {_setting(status, '[repo] kind')}; `miner-guard config --changed` shows it"
        return repo.reason, step
    if audit is not None and audit.outcome == "unknown":
        return f"the last audit could not tell: {audit.detail}", _AUDIT_IT
    if push is not None and push.outcome == "verified":
        every = f"{_setting(status, '[repo] audit_every_s = 600')} does so every 10 min"
        step = f"run `miner-guard audit` to see whether validators accept it; {every}"
        return "the last upload was verified, but no audit has judged it", step
    if push is not None:
        logs = "`miner-guard logs --event upload_unverified -n 1`"
        return f"the last upload was not verified{_error_of(push)}", f"{_AUDIT_IT}; why: {logs}"
    if repo.reason is not None:
        return f"the published files cannot be read: {repo.reason}", _AUDIT_IT
    if repo.age_s is not None:
        return "no audit has judged the published files", _AUDIT_IT
    if repo.empty or uploads.decision is not None:
        logs = "`miner-guard logs --event upload_blocked --event upload_failed`"
        return "nothing is published yet", f"wait for the first upload; if none comes: {logs}"
    return "the repo has not been read yet", ""


def _error_of(push: LastUpload) -> str:
    """Of what the miner or its storage said, only what may leave the machine."""
    error = public(str(push.error or "")).removeprefix("not verified: ")
    return f": {shortened(error, _MAX_EXCERPT)}" if error else ""


def _progress(status: StatusDocument) -> str:
    steps = status.steps
    words = f"training at outer step {or_unknown(steps.outer_step)}, inner step "
    loss = "" if steps.loss is None else f", loss {or_unknown(steps.loss, '.2f')}"
    return f"{words}{or_unknown(steps.inner_step)}{loss}{_client(status) or _pause(steps)}"


def _pause(steps: StepsStatus) -> str:
    """The phase that keeps the miner from its next step; empty while steps come as usual."""
    age_s, usual_s = steps.last_step_age_s or 0.0, steps.p50_s or steps.step_time_s or math.inf
    if not steps.phase or age_s < max(_PAUSE_S, 2.0 * usual_s):
        return ""
    return f"; in {steps.phase}, last step {span(age_s)} ago"


_PAUSE_S = 5.0
"""The time since the last step is news only once it is longer than this and two usual steps."""

_SETTLED_S = 5.0
"""The log tells of a state once it has held this long; shorter ones have events of their own. The
surfaces show each state at once."""

_UNWATCHED_S = 60.0
"""If two ticks or two guards are further apart than this (the host was suspended), the time in
between counts as unwatched."""

_REPORTED = (
    *("life", "stage", "health", "earning", "earning_why", "since", "cause", "next_step", "key"),
)


def _place(state: RunState) -> tuple[str, str | None]:
    """What makes a state another one; the numbers in its sentence do not."""
    return first_words(state), state.key


class StateMonitor(Monitor):
    """Judges the status document at each tick; the log tells of each change that lasts."""

    name = "verdict"
    order = 90

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._memory = Memory(context.config.hang)
        self._ended = False
        self._state: RunState | None = None
        self._logged: RunState | None = None
        self._interrupted = False
        """Whether something stopped the miner since the log last said that it trains."""

        self._changed_at = context.clock.monotonic()
        """When the condition began that holds now."""

        self._ticked_at, wall = context.clock.monotonic(), context.clock.wall()
        self._changes: Changes = ()
        before = read_status(context.state)
        if before is not None and before.verdict is not None:
            self._changes = [(float(time), str(colour)) for time, colour in before.verdict.changes]
            if before.age_s > _UNWATCHED_S:
                self._changes = with_change(self._changes, UNWATCHED, wall - before.age_s)
        self._changes = with_change(self._changes, GREY, wall)

    def on_launch(self, launch: Launch) -> Iterable[Event]:
        self._memory.launched()
        return ()

    def on_event(self, event: Event) -> Iterable[Event]:
        self._memory.take(event, self.context.clock.wall())
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Event]:
        self._memory.stepped(rank, steps[-1].loss)
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        self._judge(now)
        if now - self._changed_at < _SETTLED_S or not self._is_news():
            return []
        told = self._tell()
        if self._state is None or self._state.life != TRAINING or not self._interrupted:
            return [told]
        self._interrupted = False
        # The card is read from the disk.
        self.context.jobs.once("the incident's card", lambda: self._emit_with_card(told))
        return []

    def _emit_with_card(self, told: Event) -> None:
        card = latest(RunReader(self.context.state.db))
        over = "" if card is None or card.over is None else f". Over: {card.sentence}"
        self.context.emit(replace(told, text=f"{told.text}{over}"))

    def on_stop(self) -> Iterable[Event]:
        """The final state: nothing is training here anymore."""
        self._ended = True
        self._judge(self.context.clock.monotonic())
        return [self._tell()] if self._is_news() else []

    def _judge(self, now: float) -> None:
        document = self.context.status()
        if not document and not self._ended:
            return
        status = StatusDocument.from_json(document)
        if self._ended:
            status = replace(status, state="done")
        state, wall = judge(status, self._memory), self.context.clock.wall()
        before, self._state = self._state, state
        self._interrupted |= state.life in (HUNG, RESTARTING)
        asleep_s, self._ticked_at = now - self._ticked_at, now
        if asleep_s > _UNWATCHED_S:
            self._changes = with_change(self._changes, UNWATCHED, wall - asleep_s)
        if self._changes[-1][1] != state.colour:
            self._changes = with_change(self._changes, str(state.colour), wall)
        if before is None or _place(before) != _place(state):
            self._changed_at = now
        if before is not None and first_words(before) == first_words(state):
            self._state = replace(state, since=before.since)
            return
        begin = wall - float(self._memory.of("hang_detected").get("idle_s") or 0.0)
        self._changes = with_change(self._changes, str(state.colour), begin)
        if self._logged is not None and first_words(self._logged) == first_words(state):
            # What was in between was too short for the log: the earlier state continues.
            self._state = replace(state, since=self._logged.since)
            return
        if state.key == "stale":
            # It may have been so for hours before this guard started.
            repo = status.uploads.repo
            begin = min(begin, wall - (repo.age_s or 0.0) + (repo.limit_s or math.inf))
        self._state = replace(state, since=iso_utc(begin))

    def _is_news(self) -> bool:
        logged, state = self._logged, self._state
        return state is not None and (logged is None or _place(logged) != _place(state))

    def _tell(self) -> Event:
        assert self._state is not None
        previous, self._logged = self._logged, self._state
        line = headline(self._state, iso_utc(self.context.clock.wall()))
        earns = self._state.earning and self._state.earning_why
        earning = f"; earning {earning_words(self._state)}" if earns else ""
        return event(
            "verdict_changed",
            "info",
            f"VERDICT: {line}{earning}",
            headline=line,
            previous=None if previous is None else previous.life,
            **{name: getattr(self._state, name) for name in _REPORTED},
        )

    def snapshot(self) -> Mapping[str, Any]:
        self._judge(self.context.clock.monotonic())
        state = self._state or RunState(
            life=STARTING, health="well", colour=GREY, cause="the guard has just started"
        )
        return replace(state, changes=self._changes).to_json()
