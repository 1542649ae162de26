"""A month of events through every monitor at once, with a fake clock: memory and files stay
bounded."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from miner_guard.record.events import degraded
from miner_guard.system.clock import FakeClock
from miner_guard.watch.base import Exit, Launch
from miner_guard.watch.evidence import MAX_INCIDENTS
from tests.support.contexts import JobsNever
from tests.support.run_harness import LOGS, RANKS, WholeRun

SHIFT_S, SHIFTS, STEPS_PER_SHIFT = 7200.0, 30 * 12, 8
OOM = (
    b"[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate %d.00 MiB. GPU "
    b"0 has 23 GiB.\n"
)


class Jobs(JobsNever):
    """Runs one-time work immediately; samplers, which would query real devices, do not run."""

    def once(self, name: str, work: Callable[[], None]) -> None:
        if name.endswith("evidence"):
            work()


class Month(WholeRun):
    """A miner that crashes every twelve hours, each time for a different reason."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, FakeClock(), Jobs(), None)
        self.attempt = 0

    def shift(self, number: int) -> None:
        if number % 6 == 0:
            self.attempt += 1
            self.host.launch(
                Launch(("train",), 1000 + self.attempt, self.attempt, self.clock.monotonic())
            )
            self.entries(
                {
                    "kind": "training",
                    "effective_batch_size": 512,
                    "batch_size": 4,
                    "world_size": RANKS,
                }
            )
        for _ in range(STEPS_PER_SHIFT):
            self.clock.advance(SHIFT_S / STEPS_PER_SHIFT)
            self.step(15.0 + self.steps % 7)
            self.tick()
        self.entries(
            {
                "kind": "cost",
                "operation": f"operation {number % 5}",
                "seconds": 0.5,
                "blocking": True,
                "count": 1,
            },
            {
                "kind": "checkpoint",
                "path": f"/ckpt/{self.steps}",
                "step": self.steps,
                "size_bytes": 10**9,
                "seconds": 5,
            },
        )
        self.host.output(b"step %d of the miner's own words\n" % self.steps * 200)
        self.host.log(degraded(f"trouble {number}").at("info"))
        if number % 6 == 5:
            self.host.output(OOM % number)
            self.host.exit(Exit(1, None, False, False, 6 * SHIFT_S))
        self.documents = self.host.snapshots()


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_month_of_events_costs_no_more_memory_than_half_of_it(tmp_path: Path) -> None:
    month = Month(tmp_path)
    tracemalloc.start()
    try:
        for number in range(SHIFTS // 2):
            month.shift(number)
        gc.collect()
        after_half = tracemalloc.take_snapshot()
        held = tracemalloc.get_traced_memory()[0]
        for number in range(SHIFTS // 2, SHIFTS):
            month.shift(number)
        gc.collect()
        grown = (
            tracemalloc.get_traced_memory()[0]
            - held
            - sum(
                s.size_diff
                for s in tracemalloc.take_snapshot().compare_to(after_half, "filename")
                if s.traceback[0].filename == tracemalloc.__file__
            )
        )
        worst = tracemalloc.take_snapshot().compare_to(after_half, "lineno")[:8]
    finally:
        tracemalloc.stop()
    assert {f.fields["what"][:7] for f in month.degraded} == {"trouble"}, month.degraded[:3]
    assert month.printed > 500_000
    assert grown < 512 * 1024, [str(line) for line in worst]
    assert sum(path.stat().st_size for path in tmp_path.glob("guard.jsonl*")) <= 4 * LOGS.max_bytes
    assert len(list(month.state.incidents.iterdir())) == MAX_INCIDENTS
