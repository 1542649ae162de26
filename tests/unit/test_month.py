"""A month of events through every part at once, with a fake clock: memory and files stay bounded."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miner_guard.clock import FakeClock
from miner_guard.config import Config, LogSettings
from miner_guard.events import Finding, found
from miner_guard.logs import ConsoleSink, Emitter, JsonlSink
from miner_guard.rank.flight import Now, Step
from miner_guard.redact import Redactor
from miner_guard.statedir import StateDir
from miner_guard.supervisor.compose import compose
from miner_guard.supervisor.host import Host
from miner_guard.supervisor.parts import Context, Exit, Launch

SHIFT_S, SHIFTS, RANKS, STEPS_PER_SHIFT = 7200.0, 30 * 12, 2, 8
LOGS = LogSettings(max_bytes=200_000, keep=3, step_lines_per_s=1e9)
OOM = b"[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate %d.00 MiB. GPU 0 has 23 GiB.\n"


class Jobs:
    """One-time work is done at once; samplers, which ask real devices, do not run."""

    def every(self, name: str, seconds: float, work: Callable[[], None], *, first_after_s: float | None = None) -> None:
        """Nothing runs on a schedule here."""

    def once(self, name: str, work: Callable[[], None]) -> None:
        if name.endswith("evidence"):
            work()


class Month:
    """A supervisor's parts and sinks, and a miner that crashes every twelve hours with a cause of its own."""

    def __init__(self, folder: Path) -> None:
        self.clock, self.state = FakeClock(), StateDir(folder)
        self.printed = self.step = self.attempt = 0
        sinks = [ConsoleSink(self._print, LOGS), JsonlSink(self.state.log, LOGS)]
        emitter = Emitter(self.clock, "r", Redactor(), sinks)
        self.host = Host(emitter.emit)
        self.documents: dict[str, Any] = {}
        control: Any = None
        context = Context(
            Config(logs=replace(LOGS, keep_incidents=5)), self.state, self.clock, "r", self.host.finding, Jobs(),
            control, lambda: self.documents,
        )  # fmt: skip
        self.degraded: list[Finding] = []
        self.host.parts = compose(context, self.degraded.append)
        self.host.on_finding = lambda f: self.degraded.append(f) if f.event == "guard_degraded" else None

    def _print(self, text: str) -> None:
        self.printed += len(text)

    def shift(self, number: int) -> None:
        if number % 6 == 0:
            self.attempt += 1
            self.host.launch(Launch(("train",), 1000 + self.attempt, self.attempt, self.clock.monotonic()))
            self._entries({"kind": "training", "effective_batch_size": 512, "batch_size": 4, "world_size": RANKS})
        for _ in range(STEPS_PER_SHIFT):
            self._step()
        self._entries(
            {"kind": "cost", "operation": f"operation {number % 5}", "seconds": 0.5, "blocking": True, "count": 1},
            {"kind": "checkpoint", "path": f"/ckpt/{self.step}", "step": self.step, "size_bytes": 10**9, "seconds": 5},
        )
        self.host.output(b"step %d of the miner's own words\n" % self.step * 200)
        self.host.finding(found("guard_degraded", what=f"trouble {number}").at("info"))
        if number % 6 == 5:
            self.host.output(OOM % number)
            self.host.exit(Exit(1, None, False, False, 6 * SHIFT_S))
        self.documents = self.host.snapshots()

    def _step(self) -> None:
        self.step += 1
        self.clock.advance(SHIFT_S / STEPS_PER_SHIFT)
        end = self.clock.monotonic()
        for rank in range(RANKS):
            seconds = 15.0 + self.step % 7
            step = Step(
                self.step, self.step // 500, self.step % 500, self.step, end - seconds, end, self.clock.wall(),
                3.0 + 1 / self.step, True, 1e-4, 1.0, 3.1, 2e10, 2.2e10, 4096, 0,
                {"data": 1.0, "forward": 5.0, "backward": 7.0, f"phase {self.step % 9}": 0.5}, 0.0,
            )  # fmt: skip
            self.host.steps(rank, [step])
        now = {rank: self._now(end) for rank in range(RANKS)}
        self.host.tick(end, now)

    def _now(self, end: float) -> Now:
        return Now("running", "data", end, end, 1, 1, self.step, 3.0, None, None, None, self.step, 0, 0, 0)

    def _entries(self, *entries: dict[str, Any]) -> None:
        for entry in entries:
            self.host.entry(0, entry)


@pytest.mark.slow
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
        grown = tracemalloc.get_traced_memory()[0] - held - sum(
            s.size_diff for s in tracemalloc.take_snapshot().compare_to(after_half, "filename")
            if s.traceback[0].filename == tracemalloc.__file__
        )  # fmt: skip
        worst = tracemalloc.take_snapshot().compare_to(after_half, "lineno")[:8]
    finally:
        tracemalloc.stop()
    assert {f.fields["what"][:7] for f in month.degraded} == {"trouble"}, month.degraded[:3]
    assert month.printed > 500_000
    assert grown < 512 * 1024, [str(line) for line in worst]
    assert sum(path.stat().st_size for path in tmp_path.glob("guard.jsonl*")) <= 4 * LOGS.max_bytes
    assert len(list(month.state.incidents.iterdir())) == 5
