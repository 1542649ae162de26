"""Shows output to a monitor through the line router, as the supervisor does."""

from __future__ import annotations

import os
from pathlib import Path

from miner_guard.config import Config, HangSettings, MinerSettings
from miner_guard.rank.layout import FlightReader, StepRecord
from miner_guard.record.events import Event
from miner_guard.system.clock import FakeClock
from miner_guard.watch.base import Launch, Monitor
from miner_guard.watch.line_router import LineRouter
from miner_guard.watch.output import LogAttachMonitor
from tests.support.contexts import context
from tests.support.ranks import OwnRecords


def show(monitor: Monitor, *chunks: bytes) -> list[Event]:
    """The monitor's events about these chunks, the last of which ends the output."""
    router = LineRouter([monitor])
    deliveries = [delivery for chunk in chunks for delivery in router.pieces(chunk)]
    return [
        event
        for delivery in (*deliveries, *router.end())
        for event in getattr(monitor, delivery.method)(delivery.argument)
    ]


class LoggedMiner:
    """A launch of a miner that is known only by its lines."""

    def __init__(self, folder: Path, hang: HangSettings | None = None, **miner: object) -> None:
        settings = MinerSettings(**{"attach": "log", **miner})  # type: ignore[arg-type]
        self.clock = FakeClock()
        self.records = OwnRecords()
        self.monitor = LogAttachMonitor(
            context(
                folder,
                config=Config(miner=settings, hang=hang or HangSettings()),
                clock=self.clock,
                records=self.records,
            )
        )
        launch = Launch(("miner",), os.getpid(), 0, self.clock.monotonic())
        self.events: list[Event] = list(self.monitor.on_launch(launch))

    def line(self, text: str, after_s: float = 10.0) -> None:
        self.clock.advance(after_s)
        self.events += show(self.monitor, f"{text}\n".encode())

    def lines(self, *lines: str) -> None:
        for line in lines:
            self.line(line)

    @property
    def reader(self) -> FlightReader:
        return self.records.reader

    @property
    def steps(self) -> list[StepRecord]:
        return list(self.reader.steps())

    @property
    def phase(self) -> str:
        now = self.reader.now()
        assert now is not None
        return now.phase
