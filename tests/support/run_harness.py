"""A supervisor's monitors and sinks over simulated ranks, all on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from miner_guard.config import Config, LogSettings
from miner_guard.guard.app import load_monitors
from miner_guard.rank.layout import Now
from miner_guard.record.emitter import ConsoleSink, Emitter
from miner_guard.record.events import Event
from miner_guard.record.redaction import Redactor
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import FakeClock
from miner_guard.watch.base import Jobs
from miner_guard.watch.runner import MonitorRunner
from tests.support.contexts import context
from tests.support.driven_steps import make_step
from tests.support.simulated_parts import LogOnDisk

LOGS = LogSettings(max_bytes=200_000, keep=3, step_lines_per_s=1e9)
RANKS = 2


class WholeRun:
    """Every monitor of the guard, fed by `step` and `host`; `state.log` holds what it logs."""

    def __init__(
        self, folder: Path, clock: FakeClock, jobs: Jobs, report: Callable[[Event], None] | None
    ) -> None:
        """`report` receives events from jobs, in their threads; without it, they are logged
        immediately."""
        self.clock, self.state = clock, StateDir(folder)
        self.printed = self.steps = 0
        self.degraded: list[Event] = []
        self.documents: dict[str, Any] = {}
        sinks = [ConsoleSink(self._print, LOGS), LogOnDisk(self.state.log, LOGS)]
        emitter = Emitter(clock, "r", Redactor(), sinks)
        self.host = MonitorRunner(emitter.emit)
        around = context(
            folder,
            config=Config(logs=LOGS),
            clock=clock,
            emit=report or self.host.log,
            jobs=jobs,
            status=lambda: self.documents,
        )
        self.host.monitors = load_monitors(around, self.degraded.append)
        self.host.on_event = lambda f: (
            self.degraded.append(f) if f.name == "guard_degraded" else None
        )

    def _print(self, text: str) -> None:
        self.printed += len(text)

    def step(self, seconds: float) -> None:
        """All ranks end a step of `seconds` now."""
        self.steps += 1
        end, number = self.clock.monotonic(), self.steps
        for rank in range(RANKS):
            step = make_step(
                number,
                end - seconds,
                seconds,
                outer_step=number // 500,
                inner_step=number % 500,
                wall=self.clock.wall(),
                loss=3.0 + 1 / number,
                grad_norm=1.0,
                eval_loss=3.1,
                reserved_bytes=2.2e10,
                tokens=4096,
                phases={"data": 1.0, "forward": 5.0, "backward": 7.0, f"phase {number % 9}": 0.5},
            )
            self.host.steps(rank, [step])

    def tick(self) -> None:
        """The supervisor's pulse."""
        end, number = self.clock.monotonic(), self.steps
        now = Now("running", "data", end, end, 1, 1, number, 3.0, None, None, None, number)
        self.host.tick(end, dict.fromkeys(range(RANKS), now))

    def entries(self, *entries: dict[str, Any]) -> None:
        """Rank 0 journals these entries."""
        for entry in entries:
            self.host.entry(0, entry)
