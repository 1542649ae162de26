"""Simulates a run of several ranks through the monitors that judge steps, on a fake clock."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from miner_guard.config import Config
from miner_guard.rank.journal import parse
from miner_guard.rank.layout import FLAG_FIRST, Now
from miner_guard.record.events import Event
from miner_guard.system.clock import FakeClock
from miner_guard.watch.base import Launch, Monitor
from miner_guard.watch.curves import CurvesMonitor
from miner_guard.watch.line_router import LineRouter
from miner_guard.watch.ranks import RanksMonitor
from miner_guard.watch.steps import StepsMonitor
from tests.support.contexts import JobsNever, context
from tests.support.driven_steps import make_step

GIB = 1024**3


QUIET = {"inner_step", "fast_log", "timing_breakdown"}


class Run:
    """A simulated run: the steps of several ranks, on a fake clock, through all monitors that judge
    steps."""

    def __init__(
        self,
        folder: Path,
        config: Config | None = None,
        ranks: int = 2,
        jobs: JobsNever | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.status: dict[str, Any] = {}
        around = context(
            folder,
            config=config or Config(),
            clock=self.clock,
            status=lambda: self.status,
            jobs=jobs or JobsNever(),
        )
        self.monitors: list[Monitor] = [
            StepsMonitor(around),
            CurvesMonitor(around),
            RanksMonitor(around),
        ]
        self.ranks: Sequence[int] = range(ranks)
        self.number = 0
        self.seen: list[Event] = []
        self.launch()

    def launch(self) -> None:
        for each in self.monitors:
            self._take(each.on_launch(Launch((), 1, 0, self.clock.monotonic())))
        self.router = LineRouter(self.monitors)

    def _take(self, found: Iterable[Event]) -> None:
        for event in found:
            self.seen.append(event)
            for each in self.monitors:
                self._take(each.on_event(event))

    def entry(self, **entry: Any) -> None:
        parsed = parse(entry)
        assert parsed is not None
        for each in self.monitors:
            self._take(each.on_entry(0, parsed))

    def output(self, chunk: bytes) -> None:
        for monitor, method, argument in self.router.pieces(chunk):
            self._take(getattr(monitor, method)(argument))

    def renumber(self, *ranks: int) -> None:
        """A new rendezvous: the workers of this node get different ranks."""
        self.ranks = ranks
        for each in self.monitors:
            self._take(each.on_tick(self.clock.monotonic(), headers(*ranks)))

    def step(
        self,
        seconds: float,
        loss: float,
        by_rank: Mapping[int, Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> None:
        self.number += 1
        start = self.clock.monotonic()
        self.clock.advance(seconds)
        for rank in self.ranks:
            values: dict[str, Any] = {
                "outer_step": 1,
                "inner_step": self.number,
                "total_steps": self.number,
                "loss": loss,
                "lr": 2e-4,
                "allocated_bytes": 18 * GIB,
                "flags": FLAG_FIRST if self.number == 1 else 0,
                "phases": {"data": 0.01 * seconds},
                **extra,
                **(by_rank or {}).get(rank, {}),
            }
            length = values.pop("end_s", seconds)
            step = make_step(self.number - 1, start, length, **values)
            for each in self.monitors:
                self._take(each.on_steps(rank, [step]))
        for later in (0.0, 4.0):
            for each in self.monitors:
                self._take(each.on_tick(self.clock.monotonic() + later, {}))

    def alarms(self) -> list[str]:
        """Events that alert a person, excluding the ordinary lines."""
        return [f.name for f in self.seen if f.name not in QUIET]

    def of(self, event: str) -> list[Event]:
        return [f for f in self.seen if f.name == event]


def headers(*ranks: int) -> dict[int, Now]:
    """The headers that the supervisor reads from running ranks."""
    return {
        rank: Now("running", "", 0.0, 0.0, 5, 1, 1, None, None, None, None, 1) for rank in ranks
    }


def healthy(seed: int, seconds: float = 15.0, noise: float = 0.03) -> Iterator[tuple[float, float]]:
    """(step time, loss) of a healthy run: power-law descent with 2 % noise."""
    source = random.Random(seed)
    step = 0
    while True:
        step += 1
        yield seconds * source.gauss(1, noise), (2 + 5 * step**-0.3) * source.gauss(1, 0.02)
