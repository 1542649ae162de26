"""Ranks: reports ranks that compute on the CPU, stragglers, and the reason for slow steps."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from miner_guard.detectors import gpu_state
from miner_guard.detectors.cpu_fallback import CERTAIN, CLEARED, Observation, RankWatch
from miner_guard.detectors.eta import TrainingFacts
from miner_guard.detectors.slow_cause import explain
from miner_guard.detectors.straggler import Straggler, StragglerWatch
from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.eventlog.status_document import FallbackStatus, RanksStatus
from miner_guard.monitors.base import Context, Exit, Launch, Monitor
from miner_guard.rank import journal
from miner_guard.rank.journal import DiagnosisEntry, JournalEntry, TrainingEntry
from miner_guard.rank.layout import FLAG_FIRST, FLAG_LOSS_ON_CPU, Now, StepRecord
from miner_guard.record.words import gb

_SLOW_STEPS = 5

_TOGETHER_S = 3.0
"""Wait this long after a verdict changes, so that all ranks' changes appear in one line."""


class RanksMonitor(Monitor):
    """Compares the ranks; findings about several ranks are merged into one line at the next
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

    def on_launch(self, launch: Launch) -> Iterable[Finding]:
        self._reset()
        return ()

    def on_entry(self, rank: int, entry: JournalEntry) -> Iterable[Finding]:
        if isinstance(entry, TrainingEntry):
            self._facts = self._facts.with_entry(entry)
        if isinstance(entry, DiagnosisEntry):
            for report in journal.unpack([entry.report]):
                device = report.get("model_device")
                if device and isinstance(report.get("rank"), int):
                    kind = str(device).partition(":")[0]
                    self._watch(report["rank"]).diagnosed(kind, bool(report.get("offload")))
        return ()

    def _watch(self, rank: int) -> RankWatch:
        if rank not in self._watches:
            self._watches[rank] = RankWatch(self.context.config.gpu, self.context.config.steps)
        return self._watches[rank]

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Finding]:
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
                yield self._straggler_finding(seen)

    def _straggler_finding(self, seen: Straggler | tuple[int, int]) -> Finding:
        if not isinstance(seen, Straggler):
            self._last_straggler = None
            return make_finding("straggler_cleared", rank=seen[0], steps=seen[1])
        self._last_straggler = seen
        critical = seen.score >= self.context.config.steps.straggler_critical_ratio
        return make_finding(
            "straggler",
            rank=seen.rank,
            level="critical" if critical else "warning",
            detail=seen.detail(),
            score=round(seen.score, 3),
            phase=seen.phase,
            wait_s=seen.wait_s,
            others_wait_s=seen.others_wait_s,
            step_time_s=seen.step_s,
            steps=seen.steps,
        )

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Finding]:
        if ranks and (gone := self._watches.keys() - ranks.keys()):
            yield from self._forget(gone)
        if self._recent and self._recent[-1].seconds > self.context.config.steps.slow_s:
            unused = gpu_state.no_use(self._nvml(), self.context.config.gpu.low_memory_gb)
            for watch in self._watches.values():
                watch.unused = unused
        if self._changed_at is not None and now - self._changed_at >= _TOGETHER_S:
            yield from self._verdicts()
        yield from self._slow_cause()

    def _forget(self, gone: Iterable[int]) -> Iterator[Finding]:
        """After a new rendezvous this node may have different ranks: stop waiting for those that no
        longer exist."""
        for rank in list(gone):
            del self._watches[rank]
        if self._last_straggler is not None:
            yield make_finding(
                "straggler_cleared",
                rank=self._last_straggler.rank,
                steps=self._straggler.named_steps,
            )
        self._compare_anew()

    def on_exit(self, end: Exit) -> Iterable[Finding]:
        return self._verdicts()

    def _verdicts(self) -> Iterator[Finding]:
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
            yield make_finding(
                "cpu_fallback",
                rank=ranks[0] if len(ranks) == 1 else None,
                level=level,
                which=which,
                verdict=verdict,
                evidence=f"{verdict}: {', '.join(changed[ranks[0]][1])}",
                by_rank=evidence,
            )

    def _slow_cause(self) -> Iterator[Finding]:
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
        reasons, power = gpu_state.throttling(sample), gpu_state.power_share(sample)
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
            yield make_finding(
                "throughput_explained",
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
