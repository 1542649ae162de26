"""Ranks: stragglers, models on the CPU, lost ranks and nodes, and why all of them are slow."""

from __future__ import annotations

import socket
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

from miner_guard.config import GpuSettings, StepSettings
from miner_guard.rank.journal import DiagnosisEntry, JournalEntry, TrainingEntry
from miner_guard.rank.layout import FLAG_FIRST, FLAG_LOSS_ON_CPU, Now, StepRecord
from miner_guard.record.events import Event, event
from miner_guard.record.status_document import FallbackStatus, RanksStatus
from miner_guard.record.words import counted, gb, rank_list
from miner_guard.system.launcher_args import number_of, value_of
from miner_guard.watch.base import Context, Exit, Launch, Monitor
from miner_guard.watch.gpu import no_use, power_share, throttling
from miner_guard.watch.hang import RankProcesses
from miner_guard.watch.progress import TrainingFacts
from miner_guard.watch.series import SortedWindow
from miner_guard.watch.steps import scheduled_seconds

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

_OWN = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "monitor",
    "inference",
    "val_loss",
    "other",
    OUTSIDE,
)

_WINDOWS_IN_ROW = 2
_MAX_PENDING = 256


_STRAGGLER_WINDOW = 20
"""Steps over which the ranks are compared."""

_STRAGGLER_WARN_RATIO = 0.10
_STRAGGLER_CRITICAL_RATIO = 0.20
"""Limits of (the other ranks' median wait − its own wait) / step time."""

_STRAGGLER_MIN_S = 0.1
"""The waits of a straggler differ by at least this, however short the steps are."""


@dataclass(frozen=True)
class Straggler:
    """The rank that the others waited for during one window."""

    rank: int
    score: float
    wait_s: float | None
    """The culprit's median wait; None if the ranks wait outside all phases, where they also do
    their own work."""

    others_wait_s: float | None
    step_s: float
    phase: str | None
    """The phase in which the culprit is slower than the others; None if no phase stands out."""

    phase_s: float
    others_phase_s: float
    steps: int

    def detail(self) -> str:
        """Describe the evidence."""
        waits = (
            ""
            if self.wait_s is None or self.others_wait_s is None
            else f": it waits {self.wait_s:.2f}s in collectives, "
            f"the others wait {self.others_wait_s:.2f}s"
        )
        text = (
            f"is busy longer than the others by {self.score:.0%} of a {self.step_s:.2f}s step "
            f"(over {self.steps} steps{waits})"
        )
        if self.phase is not None:
            text += (
                f"; slow in {self.phase}: {self.phase_s:.2f}s, others {self.others_phase_s:.2f}s"
            )
        return text


@dataclass
class _Window:
    seconds: dict[int, list[float]] = field(default_factory=dict)
    phases: dict[int, list[Mapping[str, float]]] = field(default_factory=dict)
    count: int = 0


class StragglerWatch:
    """Judges all ranks. Memory: one window, plus up to 256 steps that some ranks have yet to
    reach."""

    def __init__(self, settings: StepSettings) -> None:
        self._settings = settings
        self._pending: dict[int, dict[int, tuple[float, Mapping[str, float]]]] = {}
        self._window = _Window()
        self._suspect: int | None = None
        self._in_row = 0
        self.named: int | None = None
        self.named_steps = 0

    def observe(
        self, rank: int, step: int, seconds: float, phases: Mapping[str, float], *, ranks: int
    ) -> Iterator[Straggler | tuple[int, int]]:
        """Record one rank's step; `ranks` is the number of ranks.

        Yields a Straggler for each window that has one, and (rank, steps) when a reported straggler
        is cleared.
        """
        if ranks < 2:
            return
        row = self._pending.setdefault(step, {})
        row[rank] = (seconds, phases)
        if len(row) < ranks:
            if len(self._pending) > _MAX_PENDING:
                del self._pending[min(self._pending)]
            return
        del self._pending[step]
        self._add(row)
        if self._window.count >= _STRAGGLER_WINDOW:
            window, self._window = self._window, _Window()
            yield from self._close(window)

    def _add(self, row: Mapping[int, tuple[float, Mapping[str, float]]]) -> None:
        for rank, (seconds, phases) in row.items():
            self._window.seconds.setdefault(rank, []).append(seconds)
            outside = max(0.0, seconds - sum(phases.values()))
            self._window.phases.setdefault(rank, []).append({**phases, OUTSIDE: outside})
        self._window.count += 1

    def _close(self, window: _Window) -> Iterator[Straggler | tuple[int, int]]:
        found = judge(window.seconds, window.phases, self._settings)
        suspect = found.rank if found is not None else None
        self._in_row = (
            self._in_row + 1
            if suspect is not None and suspect == self._suspect
            else int(suspect is not None)
        )
        self._suspect = suspect
        if self.named is not None:
            self.named_steps += window.count
            if suspect != self.named:
                yield self.named, self.named_steps
                self.named = None
        if found is not None and self._in_row >= _WINDOWS_IN_ROW:
            if self.named is None:
                self.named_steps = self._in_row * window.count
            self.named = found.rank
            yield found


def judge(
    seconds: Mapping[int, Sequence[float]],
    phases: Mapping[int, Sequence[Mapping[str, float]]],
    settings: StepSettings,
) -> Straggler | None:
    """Return the straggler of one window, or None. Waiting in phases is measured in two ways, and
    the stronger result wins; if neither gives one, the fallback is the time in which waiting can't
    be ruled out."""
    step = statistics.median(value for values in seconds.values() for value in values)
    best: Straggler | None = None
    for names in _WAITS:
        measured = OUTSIDE not in names
        if best is not None and not measured:
            break
        waits = {
            rank: statistics.median(sum(row.get(n, 0.0) for n in names) for row in rows)
            for rank, rows in phases.items()
        }
        culprit = min(waits, key=lambda r: (waits[r], r))
        others = statistics.median(wait for rank, wait in waits.items() if rank != culprit)
        gap = others - waits[culprit]
        score = gap / step if step > 0 else 0.0
        if score < _STRAGGLER_WARN_RATIO or gap < _STRAGGLER_MIN_S:
            continue
        phase, own, theirs = _slow_phase(culprit, phases, exclude=names)
        if len(names) > 1 and own - theirs < 0.5 * gap:
            continue
        if best is None or score > best.score:
            best = Straggler(
                culprit,
                score,
                waits[culprit] if measured else None,
                others if measured else None,
                step,
                phase,
                own,
                theirs,
                len(seconds[culprit]),
            )
    return best


def _slow_phase(
    culprit: int, phases: Mapping[int, Sequence[Mapping[str, float]]], exclude: Sequence[str]
) -> tuple[str | None, float, float]:
    """The phase in which the culprit's median most exceeds the others' (theirs / own < 0.75)."""
    worst: tuple[str | None, float, float] = (None, 0.0, 0.0)
    for name in _OWN:
        if name in exclude:
            continue
        medians = {
            rank: statistics.median(row.get(name, 0.0) for row in rows)
            for rank, rows in phases.items()
        }
        own = medians.pop(culprit)
        theirs = statistics.median(medians.values())
        if own > 0 and theirs / own < 0.75 and own - theirs > worst[1] - worst[2]:
            worst = (name, own, theirs)
    return worst


CERTAIN, SUSPECTED, CLEARED = "certain", "suspected", "cleared"

_LASTING = 5
"""Consecutive steps for which evidence must hold before the verdict changes, in either
direction."""

_BASELINE = 5
"""Minimum number of steps in the baseline, which excludes steps slower than twice its median."""

_FACTOR = 4.0
_EACH_FACTOR = 2.0
"""A CPU is 10-20 times slower than a GPU (source 004: 240 s versus 15 s), while a busy host makes
one step in hundreds take four times as long. So the median of the latest steps must exceed
`_FACTOR` times the baseline, but each individual step only `_EACH_FACTOR` times: a single faster
step does not prove a recovery."""

_MIN_EXCESS_S = 0.25
_MIN_SLOWED_S = 5.0
"""Seconds that the slow steps must add up to, because short steps are easily delayed."""

_KEPT = 64
"""Consecutive slow steps kept: 64 steps of 0.2 s add up to more than five seconds."""

_EXPLAINING = 0.5
"""A waiting phase must account for this share of the excess to explain a slow step."""

_WAITING = ("data", "collective", "monitor")


@dataclass(frozen=True)
class Observation:
    """Evidence from a single step on one rank."""

    seconds: float
    phases: Mapping[str, float]
    allocated_gb: float | None
    loss_on_cpu: bool


@dataclass(frozen=True)
class FallbackVerdict:
    """The verdict on one rank, with its reason."""

    verdict: str
    evidence: tuple[str, ...]


class RankWatch:
    """Judges one rank, step by step."""

    def __init__(self, gpu: GpuSettings, steps: StepSettings) -> None:
        self._gpu = gpu
        self._steps = steps
        self._baseline = SortedWindow(64)
        self._recent: deque[Observation] = deque(maxlen=_LASTING)
        self._slowed: list[float] = []
        self._seen = 0
        self.model_device: str | None = None
        """Compute device that the rank's own diagnosis reported."""

        self.offloaded = False
        self.no_gpu = False
        """Whether NVML found that this machine has no GPU."""

        self.unused: str | None = None
        """NVML's evidence that no GPU is in use, as text."""

        self.verdict: FallbackVerdict | None = None

    def observe(self, seen: Observation) -> FallbackVerdict | None:
        """Judge one step. Returns a verdict when it is new or has changed."""
        self._seen += 1
        self._recent.append(seen)
        if self._seen > 1:
            # The first step of a launch compiles and fills caches.
            self._compare(seen)
        return self._changed()

    def diagnosed(self, model_device: str | None, offloaded: bool) -> None:
        """Record the result of the rank's own diagnosis."""
        self.model_device = model_device
        self.offloaded = offloaded

    def _compare(self, seen: Observation) -> None:
        core = seen.seconds - scheduled_seconds(seen.phases)
        base = self._baseline
        if len(base) < _BASELINE:
            base.add(core)
            return
        excess = core - base.median
        waited = sum(seen.phases.get(name, 0.0) for name in _WAITING)
        slowed = (
            core > _EACH_FACTOR * base.median
            and excess > _MIN_EXCESS_S
            and waited < _EXPLAINING * excess
        )
        self._slowed = [*self._slowed, core][-_KEPT:] if slowed else []
        if core <= _EACH_FACTOR * base.median:
            base.add(core)

    def _changed(self) -> FallbackVerdict | None:
        judged = self._judge()
        before = self.verdict
        if judged is None:
            if before is None or before.verdict == CLEARED or len(self._recent) < _LASTING:
                return None
            last = self._recent[-1]
            memory = (
                "memory unknown"
                if last.allocated_gb is None
                else f"{last.allocated_gb:.2f} GB allocated"
            )
            self.verdict = FallbackVerdict(CLEARED, (f"{memory}, step {last.seconds:.1f}s",))
            return self.verdict
        if before is not None and before.verdict == judged.verdict:
            return None
        self.verdict = judged
        return judged

    def _judge(self) -> FallbackVerdict | None:
        if self._gpu.expect == 0 or not self._recent:
            return None
        last = self._recent[-1]
        low = last.allocated_gb is not None and last.allocated_gb < self._gpu.low_memory_gb
        memory = (
            [f"{last.allocated_gb:.2f} GB allocated on the GPU"]
            if last.allocated_gb is not None
            else []
        )
        certain = self._certain(last, low)
        if certain:
            return FallbackVerdict(CERTAIN, (*certain, *memory, f"step {last.seconds:.1f}s"))
        slow = [
            s for s in self._recent if s.seconds - scheduled_seconds(s.phases) > self._steps.slow_s
        ]
        idle = [self.unused] if self.unused is not None and not self._on_gpu(last) else []
        if (low or idle) and len(slow) >= 2:
            how_slow = f"step {last.seconds:.1f}s (slow above {self._steps.slow_s:g}s)"
            return FallbackVerdict(SUSPECTED, (*memory, *idle, how_slow))
        if self._lastingly_slowed() and not self._on_gpu(last) and not self.no_gpu:
            times = last.seconds / self._baseline.median
            return FallbackVerdict(
                SUSPECTED,
                (
                    *(memory or ["GPU memory use is unknown"]),
                    f"steps are taking {times:.1f} times as long as before "
                    f"({self._baseline.median:.2f}s before, {last.seconds:.2f}s now)",
                    "no waiting phase accounts for it",
                ),
            )
        return None

    def _lastingly_slowed(self) -> bool:
        if len(self._slowed) < _LASTING or sum(self._slowed) < _MIN_SLOWED_S:
            return False
        return statistics.median(self._slowed[-_LASTING:]) > _FACTOR * self._baseline.median

    def _certain(self, last: Observation, low: bool) -> list[str]:
        evidence = []
        expected = isinstance(self._gpu.expect, int) and self._gpu.expect > 0
        if (
            self.model_device == "cpu"
            and not self.offloaded
            and (low or (expected and last.allocated_gb is None))
        ):
            evidence.append("the model's compute device is cpu")
        if (
            last.loss_on_cpu
            and self.model_device in (None, "cpu")
            and (low or last.allocated_gb is None)
        ):
            evidence.append("the loss is computed on the cpu")
        return evidence

    def _on_gpu(self, last: Observation) -> bool:
        return last.allocated_gb is not None and last.allocated_gb >= self._gpu.low_memory_gb


_DOMINATES = 0.4
"""Minimum share of the step for a waiting phase to count as the cause."""


@dataclass(frozen=True)
class Explanation:
    """The cause and the numbers behind it."""

    cause: str
    arithmetic: str


def explain(
    step_time_s: float,
    phases: Mapping[str, float],
    facts: TrainingFacts,
    settings: StepSettings,
    *,
    throttle_reasons: Sequence[str] = (),
    gpu_power_share: float | None = None,
) -> Explanation | None:
    """The likeliest cause of steps that take `step_time_s`. `phases` are median seconds;
    `gpu_power_share` is the power draw as a share of the limit."""
    if throttle_reasons:
        return Explanation(
            "GPU throttled", f"{', '.join(throttle_reasons)}; step {step_time_s:.1f}s"
        )
    data = phases.get("data", 0.0)
    if data > _DOMINATES * step_time_s:
        power = (
            "" if gpu_power_share is None else f", GPU at {gpu_power_share:.0%} of its power limit"
        )
        return Explanation(
            "starved by data",
            f"data {data:.1f}s of a {step_time_s:.1f}s step ({data / step_time_s:.0%}){power}",
        )
    waiting = phases.get("collective", 0.0)
    if waiting > _DOMINATES * step_time_s:
        return Explanation(
            "waiting in collectives",
            f"collectives {waiting:.1f}s of a {step_time_s:.1f}s step "
            f"({waiting / step_time_s:.0%}): "
            "another rank or the network is slow",
        )
    return _accumulation(step_time_s, facts, settings)


def _accumulation(
    step_time_s: float, facts: TrainingFacts, settings: StepSettings
) -> Explanation | None:
    steps = facts.accumulation_steps
    if steps is None or steps < 2 or step_time_s <= settings.acceptable_s:
        return None
    each = step_time_s / steps
    fitting = max(1, int(settings.good_s / each))
    if fitting >= steps:
        return None
    batch = "" if facts.batch_size is None else f" (effective batch {fitting * facts.batch_size})"
    return Explanation(
        "accumulation too high",
        f"{steps} accumulation steps x {each * 1000:.0f} ms = {step_time_s:.0f}s; "
        f"{settings.good_s:.0f}s would fit {fitting}{batch}",
    )


_WELL = ("ended", "closed", "finished")
"""States of a rank that reached the end of its program, with or without reporting that it
finished."""


@dataclass(frozen=True)
class Left:
    """Ranks that ended while others were still running."""

    ranks: tuple[int, ...]
    detail: str


def left_behind(ranks: Mapping[int, Now], gone: Collection[int]) -> Left | None:
    """The ranks that ended while the launch is still running: those in `gone` no longer have a
    process, the rest do. None if no rank is missing."""
    staying = [rank for rank in ranks if rank not in gone]
    lost = tuple(sorted(rank for rank in gone if rank in ranks))
    if not lost or not staying:
        return None
    return Left(lost, _words(ranks, lost, staying))


def ended_early(ranks: Mapping[int, Now]) -> Left | None:
    """After the launch, the ranks that ended without an error before the others failed; None if
    there is no such rank.

    A rank that raised first is itself the cause. A rank that the launcher killed records no end
    time.
    """
    failures = [now.heartbeat for now in ranks.values() if now.state == "failed"]
    before = min(failures, default=float("inf"))
    early = tuple(
        sorted(r for r, now in ranks.items() if now.state in _WELL and now.heartbeat < before)
    )
    staying = [rank for rank, now in ranks.items() if now.state not in _WELL]
    if not early or not staying:
        return None
    return Left(early, _words(ranks, early, staying))


def _words(ranks: Mapping[int, Now], lost: Collection[int], staying: Collection[int]) -> str:
    how = ", ".join(f"rank {rank} {_how(ranks[rank])}" for rank in sorted(lost))
    return f"{how}, before {rank_list(staying)}"


def _how(now: Now) -> str:
    step = now.inner_step if now.inner_step is not None else now.total_steps
    at = f"at step {step}" if now.total_steps else "before its first step"
    return {
        "ended": f"ended with code 0 {at}",
        "closed": f"closed its guard and ended {at}",
        "finished": f"finished {at}",
        "failed": f"ended with an exception {at}",
    }.get(now.state, f"died {at} (killed, or ended by os._exit)")


_SLOW_STEPS = 5

_TOGETHER_S = 3.0
"""Wait this long after a verdict changes, so that all ranks' changes appear in one line."""


class RanksMonitor(Monitor):
    """Compares the ranks; events about several ranks are merged into one line at the next
    tick."""

    name = "ranks"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._facts = TrainingFacts.from_settings(context.config.miner, context.config.gate)
        self._reset()

    def _reset(self) -> None:
        self._watches: dict[int, RankWatch] = {}
        self._compare_anew()
        self._changed: dict[int, tuple[str, tuple[str, ...]]] = {}
        self._changed_at: float | None = None
        self._raised: set[int] = set()
        """Ranks whose CPU fallback was reported and has not cleared."""

        self._explained: str | None = None

    def _compare_anew(self) -> None:
        self._straggler = StragglerWatch(self.context.config.steps)
        self._last_straggler: Straggler | None = None
        self._recent: deque[StepRecord] = deque(maxlen=_SLOW_STEPS)

    def on_launch(self, launch: Launch) -> Iterable[Event]:
        self._reset()
        return ()

    def on_entry(self, rank: int, entry: JournalEntry) -> Iterable[Event]:
        if isinstance(entry, TrainingEntry):
            self._facts = self._facts.with_entry(entry)
        if isinstance(entry, DiagnosisEntry):
            for report in entry.reports:
                device = report.get("model_device")
                if device and isinstance(report.get("rank"), int):
                    kind = str(device).partition(":")[0]
                    self._watch(report["rank"]).diagnosed(kind, bool(report.get("offload")))
        return ()

    def _watch(self, rank: int) -> RankWatch:
        if rank not in self._watches:
            self._watches[rank] = RankWatch(self.context.config.gpu, self.context.config.steps)
        return self._watches[rank]

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Event]:
        for step in steps:
            watch = self._watch(rank)
            verdict = watch.observe(
                Observation(
                    step.seconds,
                    step.phases,
                    gb(step.allocated_bytes),
                    bool(step.flags & FLAG_LOSS_ON_CPU),
                )
            )
            if verdict is not None:
                self._changed[rank] = (verdict.verdict, verdict.evidence)
                self._changed_at = self._changed_at or self.context.clock.monotonic()
            if step.flags & FLAG_FIRST:
                continue
            if rank == min(self._watches):
                self._recent.append(step)
            ranks = len(self._watches)
            for seen in self._straggler.observe(
                rank, step.total_steps, step.seconds, step.phases, ranks=ranks
            ):
                yield self._straggler_event(seen)

    def _straggler_event(self, seen: Straggler | tuple[int, int]) -> Event:
        if not isinstance(seen, Straggler):
            self._last_straggler = None
            return event(
                "straggler_cleared",
                "info",
                f"STRAGGLER CLEARED: rank {seen[0]} after {counted(seen[1], 'step')}",
                rank=seen[0],
                steps=seen[1],
            )
        self._last_straggler = seen
        critical = seen.score >= _STRAGGLER_CRITICAL_RATIO
        return event(
            "straggler",
            "critical" if critical else "warning",
            f"STRAGGLER: rank {seen.rank} {seen.detail()}",
            rank=seen.rank,
            detail=seen.detail(),
            score=round(seen.score, 3),
            phase=seen.phase,
            wait_s=seen.wait_s,
            others_wait_s=seen.others_wait_s,
            step_time_s=seen.step_s,
            steps=seen.steps,
        )

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        if ranks and (gone := self._watches.keys() - ranks.keys()):
            yield from self._forget(gone)
        sample = self._nvml()
        # Several ranks without a GPU are a rehearsal of training with GPUs, such as the demo.
        alone = len(self._watches) == 1
        for watch in self._watches.values():
            watch.no_gpu = alone and sample is not None and sample.get("state") == "absent"
        if self._recent and self._recent[-1].seconds > self.context.config.steps.slow_s:
            unused = no_use(sample, self.context.config.gpu.low_memory_gb)
            for watch in self._watches.values():
                watch.unused = unused
        if self._changed_at is not None and now - self._changed_at >= _TOGETHER_S:
            yield from self._verdicts()
        yield from self._slow_cause()

    def _forget(self, gone: Iterable[int]) -> Iterator[Event]:
        """After a new rendezvous this node may have different ranks: stop waiting for those that no
        longer exist."""
        for rank in list(gone):
            del self._watches[rank]
        if self._last_straggler is not None:
            yield event(
                "straggler_cleared",
                "info",
                f"STRAGGLER CLEARED: rank {self._last_straggler.rank} after "
                f"{counted(self._straggler.named_steps, 'step')}",
                rank=self._last_straggler.rank,
                steps=self._straggler.named_steps,
            )
        self._compare_anew()

    def on_exit(self, end: Exit) -> Iterable[Event]:
        return self._verdicts()

    def _verdicts(self) -> Iterator[Event]:
        changed, self._changed, self._changed_at = self._changed, {}, None
        for rank, (verdict, _) in list(changed.items()):
            if verdict != CLEARED:
                self._raised.add(rank)
            elif rank in self._raised:
                self._raised.discard(rank)
            else:
                # The suspicion cleared before it was reported.
                del changed[rank]
        for verdict in sorted({verdict for verdict, _ in changed.values()}):
            ranks = sorted(rank for rank, (v, _) in changed.items() if v == verdict)
            which = ("rank " if len(ranks) == 1 else "ranks ") + ",".join(map(str, ranks))
            evidence = {rank: list(changed[rank][1]) for rank in ranks}
            level = {CERTAIN: "critical", CLEARED: "info"}.get(verdict, "warning")
            yield event(
                "cpu_fallback",
                level or "critical",
                f"CPU FALLBACK: {which}: {verdict}: {', '.join(changed[ranks[0]][1])}",
                rank=ranks[0] if len(ranks) == 1 else None,
                which=which,
                verdict=verdict,
                evidence=f"{verdict}: {', '.join(changed[ranks[0]][1])}",
                by_rank=evidence,
            )

    def _slow_cause(self) -> Iterator[Event]:
        slow_s = self.context.config.steps.slow_s
        if len(self._recent) < _SLOW_STEPS or min(s.seconds for s in self._recent) <= slow_s:
            if self._recent and self._recent[-1].seconds <= slow_s:
                self._explained = None
            return
        if self._fallback():
            # A model on the CPU already explains the slowdown.
            return
        names = {name for step in self._recent for name in step.phases}
        phases = {
            name: statistics.median(s.phases.get(name, 0.0) for s in self._recent) for name in names
        }
        step_time = statistics.median(s.seconds for s in self._recent)
        sample = self._nvml()
        reasons, power = throttling(sample), power_share(sample)
        cause = explain(
            step_time,
            phases,
            self._facts,
            self.context.config.steps,
            throttle_reasons=reasons,
            gpu_power_share=power,
        )
        if cause is not None and cause.cause != self._explained:
            self._explained = cause.cause
            yield event(
                "throughput_explained",
                "warning",
                f"SLOW BECAUSE: {cause.cause}: {cause.arithmetic}",
                cause=cause.cause,
                arithmetic=cause.arithmetic,
                step_time_s=step_time,
            )

    def _fallback(self) -> bool:
        return any(
            w.verdict is not None and w.verdict.verdict != CLEARED for w in self._watches.values()
        )

    def _nvml(self) -> Mapping[str, Any] | None:
        """The health monitor's latest GPU sample."""
        health = self.context.status().get("health")
        sample = health.get("gpus") if isinstance(health, Mapping) else None
        return sample if isinstance(sample, Mapping) else None

    def snapshot(self) -> Mapping[str, Any]:
        seen = self._last_straggler
        return RanksStatus(
            cpu_fallback={
                str(rank): FallbackStatus(watch.verdict.verdict, list(watch.verdict.evidence))
                for rank, watch in sorted(self._watches.items())
                if watch.verdict is not None
            },
            straggler=None
            if seen is None
            else {"rank": seen.rank, "score": seen.score, "detail": seen.detail()},
            slow_because=self._explained,
        ).to_json()


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
        self._ranks: frozenset[int] = frozenset()
        self._live = True

    def on_launch(self, launch: Launch) -> Iterable[Event]:
        self._begin()
        return ()

    def on_event(self, event: Event) -> Iterable[Event]:
        if event.name == "miner_stopping":
            self._live = False
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        self._ranks = frozenset(ranks)
        if not self._live or len(ranks) < 2:
            return
        if any(header.state == "failed" for header in ranks.values()):
            # Report immediately: the incidents monitor is about to name the failed rank's output as
            # the cause.
            yield from self._ended_early(ranks)
        gone = self._processes.observe().gone
        self._gone_since = {rank: self._gone_since.get(rank, now) for rank in gone}
        for_long = {rank for rank, since in self._gone_since.items() if now - since >= _NOTICE_S}
        if for_long - self._reported and (left := left_behind(ranks, gone)) is not None:
            yield self._event(left)

    def on_exit(self, end: Exit) -> Iterable[Event]:
        live, self._live = self._live, False
        if end.asked or end.finished or not live:
            return
        yield from self._ended_early(self.context.records.headers())

    def _ended_early(self, ranks: Mapping[int, Now]) -> Iterator[Event]:
        left = ended_early(ranks)
        if left is not None and not self._reported.issuperset(left.ranks):
            yield self._event(left)

    def _event(self, left: Left) -> Event:
        self._reported.update(left.ranks)
        rank = left.ranks[0] if len(left.ranks) == 1 else None
        return event(
            "rank_gone",
            "error",
            f"RANK GONE: {left.detail}",
            rank=rank,
            detail=left.detail,
            ranks=list(left.ranks),
        )


_ESTABLISHED = "01"
_DEFAULT_PORT = 29500
"""torchrun's default (`torch.distributed.run`, static rendezvous); the c10d rendezvous uses
29400."""

_RENDEZVOUS_PORT = 29400


def rendezvous(command: Sequence[str]) -> tuple[str, int] | None:
    """Host and port of this command's rendezvous; None if it runs on one node."""
    if value_of(command, "--nnodes") in (None, "1", "1:1"):
        return None
    endpoint = value_of(command, "--rdzv-endpoint")
    if endpoint:
        host, _, port = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", "")
        return host.strip("[]"), int(port) if port.isdigit() else _RENDEZVOUS_PORT
    host = value_of(command, "--master-addr") or ""
    port_given = number_of(command, "--master-port")
    return (host, _DEFAULT_PORT if port_given is None else port_given) if host else None


def peers(
    port: int, tables: Iterable[Path] = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
) -> set[str]:
    """Addresses of other hosts connected to this host's `port`."""
    found: set[str] = set()
    for table in tables:
        try:
            rows = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            _, local, remote, state = row.split()[:4]
            (_, own_port), (address, _) = _parsed(local), _parsed(remote)
            if (
                state == _ESTABLISHED
                and own_port == port
                and not address.is_loopback
                and address != _parsed(local)[0]
            ):
                found.add(str(address))
    return found


def _parsed(text: str) -> tuple[IPv4Address | IPv6Address, int]:
    """Parse an address in the kernel's format, such as `0100007F:1F90`: words of four bytes in host
    order (proc(5))."""
    digits, _, port = text.partition(":")
    words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
    address = ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address, int(port, 16)


def answers(host: str, port: int, timeout_s: float) -> str | None:
    """Try to connect: None if the node's kernel responds, else why it did not."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except ConnectionRefusedError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None


def is_own(host: str) -> bool:
    """Return True if `host` is this host, that is, if this host can bind the address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


_NODE_EVERY_S = 5.0
_NODE_TIMEOUT_S = 3.0
"""How long another node may take to answer."""

_MISSES = 2
"""Consecutive failed probes before a node is reported: one lost packet does not count as an
outage."""


@dataclass
class _Node:
    """One other node. It counts as unreachable only if it has answered before."""

    port: int
    seen: bool = False
    misses: int = 0
    since: float = 0.0
    reason: str = ""

    @property
    def down(self) -> bool:
        return self.seen and self.misses >= _MISSES


class NodesMonitor(Monitor):
    """Probes on a schedule in a job thread; inactive if the command runs on one node."""

    name = "nodes"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._meeting: tuple[str, int] | None = None
        self._nodes: dict[str, _Node] = {}
        self._scheduled = False

    def on_launch(self, launch: Launch) -> Iterable[Event]:
        self._meeting = rendezvous(launch.command)
        if self._meeting is not None and not self._scheduled:
            self._scheduled = True
            self.context.jobs.every("nodes", _NODE_EVERY_S, self._look, first_after_s=1.0)
        return ()

    def _look(self) -> None:
        if self._meeting is None:
            return
        host, port = self._meeting
        if is_own(host):
            for peer in peers(port):
                self._nodes.setdefault(peer, _Node(port))
        else:
            self._nodes.setdefault(host, _Node(port))
        for name, node in list(self._nodes.items()):
            self._ask(name, node)

    def _ask(self, name: str, node: _Node) -> None:
        asked = self.context.clock.monotonic()
        reason = answers(name, node.port, _NODE_TIMEOUT_S)
        was_down = node.down
        if reason is None:
            if was_down:
                self.context.emit(
                    event(
                        "network_recovered",
                        "info",
                        f"NODE REACHABLE: {name} again after {round(asked - node.since, 1):.0f}s",
                        node=name,
                        seconds=round(asked - node.since, 1),
                    )
                )
            node.seen, node.misses, node.reason = True, 0, ""
            return
        if node.misses == 0:
            node.since = asked
        node.misses += 1
        node.reason = reason
        if node.down and not was_down:
            detail = (
                f"no response for {self.context.clock.monotonic() - node.since:.0f}s ({reason}); "
                "check its network"
            )
            self.context.emit(
                event(
                    "network_unreachable",
                    "critical",
                    f"NODE UNREACHABLE: {name}: {detail}",
                    node=name,
                    detail=detail,
                )
            )

    def snapshot(self) -> Mapping[str, Any]:
        return {
            name: {"reachable": not node.down if node.seen else None, "reason": node.reason or None}
            for name, node in list(self._nodes.items())
        }
