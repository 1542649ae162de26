"""Ranks compared: stragglers, those on the CPU, those that end, and why all of them are slow."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miner_guard.config import GpuSettings, StepSettings
from miner_guard.rank.journal import DiagnosisEntry, JournalEntry
from miner_guard.rank.layout import FLAG_FIRST, FLAG_LOSS_ON_CPU, Now, StepRecord
from miner_guard.record.events import Event, event
from miner_guard.record.status_document import FallbackStatus, GpusStatus, RanksStatus
from miner_guard.record.words import counted, gb, rank_list
from miner_guard.watch.base import Context, Events, Exit, Launch, Monitor
from miner_guard.watch.evidence import Traces, by_group, collectives
from miner_guard.watch.gpu import latest_sample, no_use, throttling, without_gpu
from miner_guard.watch.hang import RankProcesses
from miner_guard.watch.progress import FactsMonitor, TrainingFacts
from miner_guard.watch.step_times import scheduled_seconds, work_seconds

OUTSIDE = "no named phase"
"""Name for the part of a step outside all phases."""

_WAITS: tuple[tuple[str, ...], ...] = (
    ("collective",),
    ("collective", "forward", "backward"),
    ("collective", "forward", "backward", "optimizer", OUTSIDE),
    ("collective", "optimizer", OUTSIDE),
)
"""Where ranks may wait for each other, the most certain first. DDP reduces in backward, FSDP
gathers in forward too; a miner that averages the loss of each step waits after its backward."""

_WORK_PHASES = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "monitor",
    "inference",
    "val_loss",
    "other",
)

_WINDOWS_IN_ROW = 2

_COMPARED = 20
"""Steps over which the ranks are compared."""

_WARN_RATIO, _CRITICAL_RATIO = 0.10, 0.20
"""Limits of (the other ranks' median wait − the rank's own wait) / step time."""

_MIN_WAIT_S = 0.1
"""The waits of a straggler differ by at least this, however short the steps are."""


@dataclass(frozen=True)
class Straggler:
    """The rank that the others waited for during one window."""

    rank: int
    score: float
    """Share of the step time by which it is busy longer than the others."""

    step_s: float
    evidence: str
    """What was measured, in words."""

    phase: str | None = None
    """The phase in which the rank is slower than the others; None if no phase stands out."""

    phase_s: float = 0.0
    others_phase_s: float = 0.0
    """Median seconds of this rank and of the others in that phase."""

    def detail(self) -> str:
        slow = f"; slow in {self.phase}: {self.phase_s:.2f}s, others {self.others_phase_s:.2f}s"
        return (
            f"is busy longer than the others by {self.score:.0%} of a {self.step_s:.2f}s step "
            f"({self.evidence}){'' if self.phase is None else slow}"
        )


def by_phases(steps: Mapping[int, Sequence[StepRecord]]) -> Straggler | None:
    """Return the straggler of one window, or None. Waiting in phases is measured in two ways, and
    the stronger result wins; if neither gives one, the fallbacks are the time in which waiting
    can't be ruled out and, where ranks rarely wait for each other (local SGD, DiLoCo, processes
    without torch.distributed), the steps that take one of them longer."""
    phases = {
        rank: [
            {**row.phases, OUTSIDE: max(0.0, row.seconds - sum(row.phases.values()))}
            for row in rows
        ]
        for rank, rows in steps.items()
    }
    step_s = statistics.median(row.seconds for rows in steps.values() for row in rows)
    best: Straggler | None = None
    for names in _WAITS:
        measured = OUTSIDE not in names
        if best is not None and not measured:
            break
        waits = _medians(phases, names)
        culprit = min(waits, key=lambda rank: (waits[rank], rank))
        others = statistics.median(wait for rank, wait in waits.items() if rank != culprit)
        gap = others - waits[culprit]
        score = gap / step_s if step_s > 0 else 0.0
        if score < _WARN_RATIO or gap < _MIN_WAIT_S:
            continue
        phase, busy_s, others_s = _slow_phase(culprit, phases, exclude=names)
        if len(names) > 1 and busy_s - others_s < 0.5 * gap:
            continue
        if best is None or score > best.score:
            words = f"over {len(steps[culprit])} steps"
            if measured:
                # Outside all phases, ranks also do their own work.
                words += f": it waits {waits[culprit]:.2f}s in collectives, "
                words += f"the others wait {others:.2f}s"
            best = Straggler(culprit, score, step_s, words, phase, busy_s, others_s)
    return best or _alone(phases, steps)


def _alone(
    phases: Mapping[int, Sequence[Mapping[str, float]]], steps: Mapping[int, Sequence[StepRecord]]
) -> Straggler | None:
    """The rank whose steps take longer, mostly in a phase of work: it does not wait there."""
    seconds = {rank: statistics.median(row.seconds for row in rows) for rank, rows in steps.items()}
    slowest = max(seconds, key=lambda rank: (seconds[rank], -rank))
    step_s = seconds.pop(slowest)
    gap = step_s - statistics.median(seconds.values())
    phase, busy_s, others_s = _slow_phase(slowest, phases, exclude=(OUTSIDE, *_WAITS[0]))
    if gap < max(_MIN_WAIT_S, _WARN_RATIO * step_s) or busy_s - others_s < 0.5 * gap:
        return None
    words = f"over {len(steps[slowest])} steps, in which the ranks do not wait for each other"
    return Straggler(slowest, gap / step_s, step_s, words, phase, busy_s, others_s)


def _medians(
    phases: Mapping[int, Sequence[Mapping[str, float]]], names: Sequence[str]
) -> dict[int, float]:
    """By rank, the median seconds that a step spends in these phases."""
    return {
        rank: statistics.median(sum(row.get(name, 0.0) for name in names) for row in rows)
        for rank, rows in phases.items()
    }


def _slow_phase(
    culprit: int, phases: Mapping[int, Sequence[Mapping[str, float]]], exclude: Sequence[str]
) -> tuple[str | None, float, float]:
    """The phase in which the culprit's median most exceeds the others' (theirs / own < 0.75)."""
    worst: tuple[str | None, float, float] = (None, 0.0, 0.0)
    for name in (*_WORK_PHASES, OUTSIDE):
        medians = _medians(phases, (name,))
        busy_s = medians.pop(culprit)
        others_s = statistics.median(medians.values())
        slower = name not in exclude and 0.75 * busy_s > others_s
        if slower and busy_s - others_s > worst[1] - worst[2]:
            worst = (name, busy_s, others_s)
    return worst


_MIN_ARRIVALS = 5
_LAST_SHARE = 0.8
"""Share of the collectives with a late rank in which it must be the same rank."""


def by_arrivals(traces: Traces, step_s: float) -> Straggler | None:
    """Return the rank that the others wait for in collectives, by the times at which each rank
    entered them; None if there is none.

    It finds a rank that is slow where nothing names what it does, while all ranks step alike.
    """
    late_s = max(_MIN_WAIT_S, _WARN_RATIO * step_s)
    for ranks in by_group(traces).values():
        entered: dict[int, dict[int, float]] = {}
        for rank, entries in ranks.items():
            for entry in entries:
                if (at := entry.get("time_created_ns")) is not None:
                    entered.setdefault(int(entry["collective_seq_id"]), {})[rank] = at / 1e9
        lags: dict[int, list[float]] = {}
        common = [row for _, row in sorted(entered.items()) if len(row) == len(ranks) > 1]
        for row, following in itertools.pairwise(common):
            last = max(row, key=lambda rank: row[rank])
            lag = row[last] - statistics.median(at for rank, at in row.items() if rank != last)
            # A rank that enters the next collective before the last one enters this one does not
            # wait for it: the GPU has more work in its queue.
            wait = min(at for rank, at in following.items() if rank != last) >= row[last]
            if wait and lag >= late_s:
                lags.setdefault(last, []).append(lag)
        if not lags:
            continue
        rank = max(lags, key=lambda rank: len(lags[rank]))
        count, late = len(lags[rank]), sum(map(len, lags.values()))
        span = max(common[-1].values()) - max(common[0].values())
        score = min(1.0, sum(lags[rank]) / span) if span > 0 else 0.0
        enough = count >= _MIN_ARRIVALS and count >= _LAST_SHARE * late
        if enough and score >= _WARN_RATIO:
            lag = statistics.median(lags[rank])
            words = f"it enters {count} of {len(common)} collectives {lag:.2f}s after the others"
            return Straggler(rank, score, step_s, words)
    return None


class StragglerWatch:
    """Names a straggler after two windows in a row, and clears it."""

    def __init__(self) -> None:
        self._suspect: int | None = None
        self._in_row = self._steps = 0
        self.named: Straggler | None = None

    def close(self, straggler: Straggler | None, steps: int) -> Iterator[Event]:
        """Take the straggler of one window, which is `steps` long."""
        suspect = None if straggler is None else straggler.rank
        self._in_row = self._in_row + 1 if suspect == self._suspect else 1
        self._suspect = suspect
        self._steps += steps
        if self.named is not None and self.named.rank != suspect:
            yield from self.clear()
        if straggler is None or self._in_row < _WINDOWS_IN_ROW:
            return
        if self.named is None:
            self._steps = self._in_row * steps
        critical = straggler.score >= _CRITICAL_RATIO
        again = self.named is not None and critical == (self.named.score >= _CRITICAL_RATIO)
        self.named = straggler
        told = event(
            "straggler",
            "critical" if critical else "warning",
            f"STRAGGLER: rank {straggler.rank} {straggler.detail()}",
            rank=straggler.rank,
            detail=straggler.detail(),
            score=round(straggler.score, 3),
            phase=straggler.phase,
            step_time_s=straggler.step_s,
        )
        # The console has said so; run.db keeps each window.
        yield told.at("debug") if again else told

    def clear(self) -> Iterator[Event]:
        """The named rank keeps up again, or is no longer on this node."""
        if self.named is not None:
            rank, self.named = self.named.rank, None
            after = counted(self._steps, "step")
            text = f"STRAGGLER CLEARED: rank {rank} after {after}"
            yield event("straggler", "info", text, rank=rank, steps=self._steps)


_DOMINATES = 0.4
"""Minimum share of the step for a waiting phase to count as the cause."""


def explain(
    step_s: float,
    phases: Mapping[str, float],
    facts: TrainingFacts,
    settings: StepSettings,
    *,
    sample: GpusStatus,
) -> tuple[str, str] | None:
    """The likeliest cause of steps that take `step_s`, and the numbers behind it. `phases` are
    median seconds; `sample` is NVML's latest."""
    if reasons := throttling(sample):
        return "GPU throttled", f"{', '.join(reasons)}; step {step_s:.1f}s"
    for phase, cause in (("data", "starved by data"), ("collective", "waiting in collectives")):
        seconds = phases.get(phase, 0.0)
        if seconds > _DOMINATES * step_s:
            hint = "" if phase == "data" else ": another rank or the network is slow"
            share = f"{seconds:.1f}s of a {step_s:.1f}s step ({seconds / step_s:.0%})"
            return cause, f"{phase} {share}{hint}"
    # Source 004's problem 2.
    steps = facts.accumulation_steps or 1
    each = step_s / steps
    fitting = max(1, int(settings.good_s / each))
    if step_s <= settings.acceptable_s or fitting >= steps:
        return None
    batch = "" if facts.batch_size is None else f" (effective batch {fitting * facts.batch_size})"
    arithmetic = f"{steps} accumulation steps x {each * 1000:.0f} ms = {step_s:.0f}s; "
    arithmetic += f"{settings.good_s:.0f}s would fit {fitting}{batch}"
    return "accumulation too high", arithmetic


CERTAIN, SUSPECTED, CLEARED = "certain", "suspected", "cleared"

_RECENT = 5
"""Two of this many latest steps must be slow for a suspicion, with low memory or idle GPUs: a model
does not move to the CPU during a launch, so slower steps alone are no evidence."""

_MAX_STEPS = 32


class RankWatch:
    """One rank's recent steps, and whether its model computes on the CPU although it has a GPU."""

    def __init__(self, gpu: GpuSettings, steps: StepSettings) -> None:
        self._gpu, self._slow_s = gpu, steps.slow_s
        self.steps: deque[StepRecord] = deque(maxlen=_MAX_STEPS)
        """The latest steps after the first, which compiles and fills caches."""

        self.new = 0
        """Steps since the ranks were last compared."""

        self.model_device: str | None = None
        """Compute device that the rank's own diagnosis reported."""

        self.offloaded = False
        self.no_gpu = False
        """Whether training without a GPU is right; see `without_gpu`."""

        self.unused: str | None = None
        """NVML's evidence that no GPU is in use, as text."""

        self.verdict: FallbackStatus | None = None

    def observe(self, step: StepRecord) -> None:
        if not step.flags & FLAG_FIRST:
            self.steps.append(step)
            self.new += 1
        before = CLEARED if self.verdict is None else self.verdict.verdict
        verdict, evidence = self._judge(step)
        clears = before != CLEARED and len(self.steps) >= _RECENT
        if verdict != before and (verdict != CLEARED or clears):
            seconds = f"step {step.seconds:.1f}s"
            if verdict == SUSPECTED:
                seconds += f" (slow above {self._slow_s:g}s)"
            self.verdict = FallbackStatus(verdict, [*evidence, seconds])

    def _judge(self, step: StepRecord) -> tuple[str, list[str]]:
        memory = gb(step.allocated_bytes)
        holds = [] if memory is None else [f"{memory:.2f} GB allocated on the GPU"]
        if self._gpu.expect != 0:
            low = memory is not None and memory < self._gpu.low_memory_gb
            if certain := self._certain(step, low=low):
                return CERTAIN, [*certain, *holds]
            suspicious = self.unused is not None if memory is None else low
            if suspicious and not self.no_gpu and self._is_slow():
                return SUSPECTED, [*holds, *filter(None, [self.unused])]
        return CLEARED, holds or ["memory unknown"]

    def _is_slow(self) -> bool:
        recent = itertools.islice(reversed(self.steps), _RECENT)
        seconds = (step.seconds - scheduled_seconds(step.phases) for step in recent)
        return sum(each > self._slow_s for each in seconds) >= 2

    def _certain(self, step: StepRecord, *, low: bool) -> list[str]:
        evidence, unknown = [], step.allocated_bytes is None
        expected = isinstance(self._gpu.expect, int) and self._gpu.expect > 0
        on_cpu = self.model_device == "cpu" and not self.offloaded
        if on_cpu and (low or (expected and unknown)):
            evidence.append("the model's compute device is cpu")
        loss_on_cpu = step.flags & FLAG_LOSS_ON_CPU and self.model_device in (None, "cpu")
        if loss_on_cpu and (low or unknown):
            evidence.append("the loss is computed on the cpu")
        return evidence


_SLOW_STEPS = 5

_TOGETHER_S = 3.0
"""Wait this long after a verdict changes, so that all ranks' changes appear in one line."""

_MIN_ASK_S, _MAX_ASK_S = 10.0, 1800.0
"""Shortest and longest interval between two questions for the ranks' collectives, which costs each
rank milliseconds; it doubles while no rank is late."""


class RanksMonitor(FactsMonitor):
    """Compares the ranks; events about several ranks are merged into one line at the next
    tick."""

    name = "ranks"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._reset()

    def _reset(self) -> None:
        self._watches: dict[int, RankWatch] = {}
        self._straggler = StragglerWatch()
        self._compared = 0
        """Steps compared since the straggler watch was told of a window."""

        self._asked_at, self._ask_after_s = float("-inf"), _MIN_ASK_S
        self._answers: deque[Straggler | None] = deque(maxlen=1)
        """What the ranks' collectives have shown, from a job's thread."""

        self._late_in_collectives = False
        """Whether the suspect is known from its collectives, not from its phases."""

        self._changed_at: float | None = None
        self._reported: dict[int, str] = {}
        """The verdict on each rank's CPU fallback that was reported last."""

        self._explained: str | None = None

    def on_launch(self, launch: Launch) -> Events:
        self._reset()
        return ()

    def on_entry(self, rank: int, entry: JournalEntry) -> Events:
        if isinstance(entry, DiagnosisEntry):
            for report in entry.reports:
                device = report.get("model_device")
                if device and isinstance(report.get("rank"), int):
                    watch = self._watch(report["rank"])
                    watch.model_device = str(device).partition(":")[0]
                    watch.offloaded = bool(report.get("offload"))
        return super().on_entry(rank, entry)

    def _watch(self, rank: int) -> RankWatch:
        if rank not in self._watches:
            self._watches[rank] = RankWatch(self.context.config.gpu, self.context.config.steps)
        return self._watches[rank]

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Events:
        watch = self._watch(rank)
        for step in steps:
            watch.observe(step)
            if len(self._watches) > 1 and min(w.new for w in self._watches.values()) >= _COMPARED:
                yield from self._compare()

    def _compare(self) -> Iterator[Event]:
        """Compare the ranks over the latest steps of each."""
        rows = {rank: list(watch.steps)[-_COMPARED:] for rank, watch in self._watches.items()}
        for watch in self._watches.values():
            watch.new = 0
        self._compared += _COMPARED
        straggler = by_phases(rows)
        if straggler is not None or not self._late_in_collectives:
            self._late_in_collectives = False
            yield from self._close(straggler)
        now = self.context.clock.monotonic()
        if straggler is None and now - self._asked_at >= self._ask_after_s:
            self._asked_at = now
            step_s = statistics.median(step.seconds for row in rows.values() for step in row)
            self.context.jobs.once("collectives", lambda: self._ask(list(rows), step_s))

    def _ask(self, ranks: Collection[int], step_s: float) -> None:
        """Compare the times at which the ranks enter their collectives. Runs in a job."""
        traces = collectives(self.context.state, self.context.records, ranks)
        self._answers.append(by_arrivals(traces, step_s))

    def _close(self, straggler: Straggler | None) -> Iterator[Event]:
        steps, self._compared = self._compared, 0
        yield from self._straggler.close(straggler, steps)

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Events:
        if ranks and (gone := self._watches.keys() - ranks.keys()):
            # After a new rendezvous this node may have different ranks: stop waiting for those
            # that no longer exist.
            for rank in gone:
                del self._watches[rank]
            yield from self._straggler.clear()
            self._straggler = StragglerWatch()
        if self._answers:
            straggler = self._answers.popleft()
            self._ask_after_s = _MIN_ASK_S if straggler else min(2 * self._ask_after_s, _MAX_ASK_S)
            self._late_in_collectives = straggler is not None
            yield from self._close(straggler)
        sample, no_gpu = latest_sample(self.context), without_gpu(self.context)
        unused = no_use(sample, self.context.config.gpu.low_memory_gb)
        for watch in self._watches.values():
            watch.no_gpu, watch.unused = no_gpu, unused
        yield from self._verdicts(now)
        yield from self._slow_cause(sample)

    def on_exit(self, end: Exit) -> Events:
        return self._verdicts(None)

    def _verdicts(self, now: float | None) -> Iterator[Event]:
        """Report the verdicts that have changed, at once if `now` is None. One that cleared before
        it was reported has not changed."""
        changed = {
            rank: watch.verdict
            for rank, watch in self._watches.items()
            if watch.verdict is not None
            and watch.verdict.verdict != self._reported.get(rank, CLEARED)
        }
        if changed and now is not None:
            self._changed_at = now if self._changed_at is None else self._changed_at
            if now - self._changed_at < _TOGETHER_S:
                return
        self._changed_at = None
        for verdict in sorted({str(each.verdict) for each in changed.values()}):
            ranks = sorted(rank for rank, each in changed.items() if each.verdict == verdict)
            self._reported |= dict.fromkeys(ranks, verdict)
            evidence = f"{verdict}: {', '.join(changed[ranks[0]].evidence)}"
            yield event(
                "cpu_fallback",
                {CERTAIN: "critical", CLEARED: "info"}.get(verdict, "warning"),
                f"CPU FALLBACK: {rank_list(ranks)}: {evidence}",
                rank=ranks[0] if len(ranks) == 1 else None,
                which=rank_list(ranks),
                verdict=verdict,
                evidence=evidence,
            )

    def _slow_cause(self, sample: GpusStatus) -> Iterator[Event]:
        """Say once why all steps take longer than the absolute limit, if that is known."""
        slow_s = self.context.config.steps.slow_s
        latest = {rank: w.steps[-1] for rank, w in self._watches.items() if w.steps}
        work = work_seconds(latest)
        busiest = max(work, key=lambda rank: (work[rank], -rank), default=None)
        if busiest is None or latest[busiest].seconds <= slow_s:
            self._explained = None
            return
        steps = list(self._watches[busiest].steps)[-_SLOW_STEPS:]
        short = len(steps) < _SLOW_STEPS or min(step.seconds for step in steps) <= slow_s
        verdicts = [w.verdict.verdict for w in self._watches.values() if w.verdict is not None]
        if short or {CERTAIN, SUSPECTED}.intersection(verdicts):
            # A model on the CPU already explains the slowdown.
            return
        names = {name for step in steps for name in step.phases}
        phases = {n: statistics.median(step.phases.get(n, 0.0) for step in steps) for n in names}
        step_s = statistics.median(step.seconds for step in steps)
        explanation = explain(step_s, phases, self.facts, self.context.config.steps, sample=sample)
        if explanation is not None and explanation[0] != self._explained:
            self._explained, arithmetic = explanation
            yield event(
                "slow_step",
                "warning",
                f"SLOW BECAUSE: {self._explained}: {arithmetic}",
                rank=busiest,
                cause=self._explained,
                arithmetic=arithmetic,
                step_time_s=step_s,
            )

    def snapshot(self) -> Mapping[str, Any]:
        verdicts = {str(r): w.verdict for r, w in sorted(self._watches.items()) if w.verdict}
        return RanksStatus(verdicts).to_json()


_WELL = ("ended", "closed", "finished")
"""States of a rank that reached the end of its program, with or without reporting that it
finished."""


def left_behind(ranks: Mapping[int, Now], gone: Collection[int]) -> tuple[list[int], str] | None:
    """The ranks that ended while the launch is still running, and how: those in `gone` no longer
    have a process, the rest do. None if no rank is missing."""
    return _ended(ranks, {rank for rank in gone if rank in ranks}, ranks.keys() - set(gone))


def ended_early(ranks: Mapping[int, Now]) -> tuple[list[int], str] | None:
    """After the launch, the ranks that ended without an error before the others failed, and how;
    None if there is no such rank.

    A rank that raised first is itself the cause. A rank that the launcher killed records no end
    time.
    """
    failures = [now.heartbeat for now in ranks.values() if now.state == "failed"]
    before = min(failures, default=float("inf"))
    well = {rank for rank, now in ranks.items() if now.state in _WELL}
    return _ended(ranks, {r for r in well if ranks[r].heartbeat < before}, ranks.keys() - well)


def _ended(
    ranks: Mapping[int, Now], lost: Collection[int], staying: Collection[int]
) -> tuple[list[int], str] | None:
    if not lost or not staying:
        return None
    how = ", ".join(f"rank {rank} {_how(ranks[rank])}" for rank in sorted(lost))
    return sorted(lost), f"{how}, before {rank_list(staying)}"


def _how(now: Now) -> str:
    step = now.inner_step if now.inner_step is not None else now.total_steps
    at = f"at step {step}" if now.total_steps else "before its first step"
    return {
        "ended": f"ended with code 0 {at}",
        "closed": f"closed its guard and ended {at}",
        "finished": f"finished {at}",
        "failed": f"ended with an exception {at}",
    }.get(now.state, f"died {at} (killed, or ended by os._exit)")


_NOTICE_S = 3.0
"""How long a rank must be gone before it is reported: at the end of training, the ranks of a launch
exit up to a few seconds apart."""


class RankEndsMonitor(Monitor):
    """Runs before the incidents monitor, since what the other ranks print about the missing
    rank is only a consequence."""

    name = "rank_ends"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._begin()

    def _begin(self) -> None:
        self._processes = RankProcesses(self.context.records)
        self._gone_since: dict[int, float] = {}
        self._reported: set[int] = set()
        self._live = True

    def on_launch(self, launch: Launch) -> Events:
        self._begin()
        return ()

    def on_event(self, event: Event) -> Events:
        if event.name == "miner_stopping":
            self._live = False
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Events:
        if not self._live or len(ranks) < 2:
            return
        if any(header.state == "failed" for header in ranks.values()):
            # Report immediately: the incidents monitor is about to name the failed rank's output as
            # the cause.
            yield from self._report(ended_early(ranks))
        gone = self._processes.observe().gone
        self._gone_since = {rank: self._gone_since.get(rank, now) for rank in gone}
        if any(now - since >= _NOTICE_S for since in self._gone_since.values()):
            yield from self._report(left_behind(ranks, gone))

    def on_exit(self, end: Exit) -> Events:
        live, self._live = self._live, False
        if live and not end.asked and not end.finished:
            yield from self._report(ended_early(self.context.records.headers()))

    def _report(self, ended: tuple[list[int], str] | None) -> Iterator[Event]:
        if ended is None or self._reported.issuperset(ended[0]):
            return
        ranks, detail = ended
        self._reported.update(ranks)
        rank = ranks[0] if len(ranks) == 1 else None
        yield event(
            "rank_gone", "error", f"RANK GONE: {detail}", rank=rank, detail=detail, ranks=ranks
        )
