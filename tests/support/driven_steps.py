"""Feeds one rank's steps to the monitor `steps` on its fake clock."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from miner_guard.rank.layout import StepRecord
from miner_guard.record.events import Event
from miner_guard.system.clock import FakeClock
from miner_guard.watch.base import Launch
from miner_guard.watch.steps import StepsMonitor
from tests.support.contexts import context


def make_step(number: int, start: float, seconds: float, **extra: Any) -> StepRecord:
    """A step record with `phases`; `extra` overrides any other field."""
    values: dict[str, Any] = {
        "number": number,
        "outer_step": 5,
        "inner_step": number,
        "total_steps": number,
        "wall": 1e9,
        "loss": 3.0,
        "lr": 2.1e-5,
        "allocated_bytes": 18.45 * 1024**3,
    }
    return StepRecord(start=start, end=start + seconds, **{**values, **extra})


class Steps:
    """The monitor `steps` after a launch, on its own clock; `given` goes to its context."""

    def __init__(self, folder: Path, **given: Any) -> None:
        self.clock = FakeClock()
        self.monitor = StepsMonitor(context(folder, clock=self.clock, **given))
        self.launch(0)

    def launch(self, attempt: int) -> None:
        list(self.monitor.on_launch(Launch((), 1, attempt, self.clock.monotonic())))

    def drive(self, durations: Iterable[float], **extra: Any) -> list[Event]:
        """Feed steps one after the other on the monitor's clock."""
        found: list[Event] = []
        first = self.monitor.snapshot()["total_steps"] or 0
        for number, seconds in enumerate(durations, first + 1):
            step = make_step(number, self.clock.monotonic(), seconds, **extra)
            self.clock.advance(seconds)
            found += self.monitor.on_steps(0, [step])
        return found


def lines(found: Iterable[Event], event: str) -> list[str]:
    return [f.text for f in found if f.name == event]
