"""Costs: accounts for the ranks' monitoring, the hook's overhead and the guard's jobs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from miner_guard.costs import MonitoringCostTracker, set_global_tracker
from miner_guard.rank.journal import CostEntry, JournalEntry
from miner_guard.rank.layout import Now, StepRecord
from miner_guard.record.events import Event
from miner_guard.record.status_document import CostsStatus, StatusDocument
from miner_guard.watch.base import Context, Exit, Launch, Monitor

GUARD = ("guard.", "job.")
"""Prefixes of the guard's operations: `guard.hook`, `guard.loop`, `guard.helpers`, `job.NAME`."""

_EVALUATION = {"inference": "inference", "example_loss": "example loss", "val_loss": "validation"}
_LOOP_EVERY_S = 10.0


class CostsMonitor(Monitor):
    """Feeds the cost tracker. Phases and `track` calls count as separate operations."""

    name = "costs"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.tracker = MonitoringCostTracker(
            context.state.costs.parent,
            budget=context.config.costs,
            clock=context.clock,
            report=context.emit,
        )
        self.tracker.training_time(self._training_s, self._training_step_s)
        set_global_tracker(self.tracker)
        self._lead: int | None = None
        self._step_s = 0.0
        self._steps = 0
        self._ran_s = 0.0
        self._launched: float | None = None
        self._loop_cpu_s = self._helpers_cpu_s = 0.0
        self._loop_at = float("-inf")

    def on_launch(self, launch: Launch) -> Iterable[Event]:
        self._launched = launch.started
        self._lead = None
        return ()

    def on_exit(self, end: Exit) -> Iterable[Event]:
        self.tracker.running("", None)
        self._ran_s += end.runtime_s
        self._launched = None
        return ()

    def _training_s(self) -> float:
        """Return the total step time (the miner's run time if there are no steps), excluding the
        time it was blocked by monitoring."""
        running = 0.0 if self._launched is None else self.context.clock.monotonic() - self._launched
        return (self._step_s or self._ran_s + running) - self.tracker.finished_s()

    def _training_step_s(self) -> float | None:
        """Training seconds per step on the lead rank; None before its first step."""
        return max(0.0, self._training_s()) / self._steps if self._steps else None

    def on_entry(self, rank: int, entry: JournalEntry) -> Iterable[Event]:
        # Ranks wait for each other, so a cost on one delays them all: count only the lead rank's
        # costs.
        if isinstance(entry, CostEntry) and rank == (self._lead or 0):
            self.tracker.record(
                entry.operation, entry.seconds, blocking=entry.blocking, calls=entry.count
            )
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Event]:
        if self._lead is None or rank < self._lead:
            self._lead = rank
        if rank == self._lead:
            for step in steps:
                self._step_s += step.seconds
                self._steps += 1
                self._phases(step)
        return ()

    def _phases(self, step: StepRecord) -> None:
        for phase, operation in _EVALUATION.items():
            if (seconds := step.phases.get(phase, 0.0)) > 0:
                self.tracker.record(operation, seconds)
        # The `monitor` phase includes nested phases: count only the remainder.
        if (monitor_s := step.phases.get("monitor", 0.0) - step.nested_in_monitor_s) > 0:
            self.tracker.record("monitor", monitor_s)

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        if ranks and self._lead not in ranks:
            self._lead = None
        header = ranks.get(min(ranks) if self._lead is None else self._lead) if ranks else None
        if header is None:
            self.tracker.running("", None)
        else:
            self.tracker.running(header.operation, header.operation_since)
        if now - self._loop_at >= _LOOP_EVERY_S:
            self._loop_at = now
            self._enter_guard_cpu()
        return ()

    def _enter_guard_cpu(self) -> None:
        """Record the supervisor's CPU time outside jobs (relay, detectors, sinks), and that of its
        helpers: the HTTP port, the GPU sampler, senders, probes."""
        jobs = self.tracker.background_s("job.")
        loop = time.process_time() - jobs
        self.tracker.record("guard.loop", max(0.0, loop - self._loop_cpu_s), blocking=False)
        self._loop_cpu_s = max(self._loop_cpu_s, loop)
        guard = StatusDocument.from_json(self.context.status()).health.guard
        helpers = max(self._helpers_cpu_s, guard.get("helpers_cpu_s") or 0.0)
        self.tracker.record("guard.helpers", helpers - self._helpers_cpu_s, blocking=False)
        self._helpers_cpu_s = helpers

    def on_stop(self) -> Iterable[Event]:
        self._enter_guard_cpu()
        self.tracker.write()
        return ()

    def snapshot(self) -> Mapping[str, Any]:
        report = self.tracker.get_report()
        guard_rows = [row for name, row in report["operations"].items() if name.startswith(GUARD)]
        return CostsStatus(
            share_pct=report["total_percentage"],
            budget_pct=report["budget_percentage"],
            budget_status=report["budget_status"],
            guard_blocking_pct=sum(row["percentage"] for row in guard_rows),
            guard_cpu_s=sum(row["background_time"] for row in guard_rows),
        ).to_json()
