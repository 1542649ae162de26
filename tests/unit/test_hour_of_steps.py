"""Half an hour of a run on a simulated clock, with the real schedule, monitors, samplers and files:
on time, flat and cheap."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime, tzinfo
from pathlib import Path

import psutil
import pytest

from miner_guard.costs import set_global_tracker
from miner_guard.guard.control import Status
from miner_guard.guard.jobs import JobSchedule
from miner_guard.record.events import Event
from miner_guard.record.store import RunStore
from miner_guard.state_dir import read_json
from miner_guard.system.clock import FakeClock
from miner_guard.watch.base import Launch
from tests.support.present_state import status_of
from tests.support.run_harness import WholeRun

STEP_S = 15
HOOK_S = 0.00027
"""The cost of a step in the rank."""


class Hour(WholeRun):
    """The supervisor's tick, once per simulated second; jobs run in the schedule's real threads."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = FakeClock()

        class Simulated(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return datetime.fromtimestamp(clock.wall(), tz)

        for module in ("schedulers.base", "triggers.date"):
            monkeypatch.setattr(f"apscheduler.{module}.datetime", Simulated)
        self._reported: deque[Event] = deque()
        self.events: list[tuple[float, Event]] = []
        """The events, each with its monotonic time."""

        self.jobs = JobSchedule(clock, self._reported.append)
        super().__init__(folder, clock, self.jobs, self._reported.append)
        store = RunStore(self.state.db)
        self.status = Status(clock, lambda *row: store.write(row))
        self.started = clock.monotonic()
        self.jobs.start()
        self.host.launch(Launch(("train",), 1, 0, self.started))

    def seconds(self, count: int) -> None:
        """Let time pass."""
        for _ in range(count):
            self.clock.advance(1.0)
            if (self.clock.monotonic() - self.started) % STEP_S == 0:
                self.step(float(STEP_S))
                self.entries(
                    {
                        "kind": "cost",
                        "operation": "guard.hook",
                        "seconds": HOOK_S,
                        "blocking": True,
                        "count": 1,
                    }
                )
            self.tick()
            self._run_what_is_due()
            while self._reported:
                event = self._reported.popleft()
                self.events.append((self.clock.monotonic(), event))
                self.host.log(event)
            self.documents = {"state": "running", **self.host.snapshots()}
            self.status.update(self.documents)

    def _run_what_is_due(self) -> None:
        schedule = self.jobs._scheduler
        running = schedule._executors["default"]._instances
        deadline = time.monotonic() + 30
        self.jobs.check()
        while any(
            job.next_run_time.timestamp() <= self.clock.wall() for job in schedule.get_jobs()
        ):
            schedule.wakeup()
            time.sleep(0.0002)
            assert time.monotonic() < deadline
        while any(count and job != "held" for job, count in list(running.items())):
            time.sleep(0.0002)
            assert time.monotonic() < deadline

    def at(self, event: str) -> list[float]:
        """Seconds from the start at which an event was found."""
        return [now - self.started for now, logged in self.events if logged.name == event]

    def end(self) -> None:
        self.jobs.close()
        self.host.stop()


@pytest.fixture
def hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hour]:
    made = Hour(tmp_path, monkeypatch)
    yield made
    made.end()
    set_global_tracker(None)


def _held() -> tuple[int, int]:
    """Blocks that Python has allocated, and resident bytes."""
    gc.collect()
    return sys.getallocatedblocks(), psutil.Process().memory_info().rss


@pytest.mark.slow
def test_snapshots_are_on_time_memory_is_flat_and_the_cost_is_small_and_stated(hour: Hour) -> None:
    used_before = time.process_time()
    hour.seconds(600)
    before = _held()
    hour.clock.step_wall(-3600.0)
    hour.seconds(600)
    hour.clock.step_wall(3600.0)
    hour.seconds(600)
    blocks, resident = (after - held for after, held in zip(_held(), before, strict=True))

    at = hour.at("health_snapshot")
    assert len(at) == 30
    assert all(
        later - earlier == pytest.approx(60, rel=0.1) for earlier, later in itertools.pairwise(at)
    ), at
    assert at[-1] == pytest.approx(1800, abs=6), (
        "no drift, though the wall clock was stepped back an hour and on again"
    )
    assert not hour.degraded
    assert blocks < 10_000, "windows still fill; nothing else grows"
    assert resident < 8 * 1024**2

    share = hour.documents["costs"]
    assert 0 < share["share_pct"] < 0.5
    # This process has run other tests before.
    assert (share["guard_cpu_s"] - used_before) / 1800 < 0.005, "CPU really used, of half an hour"
    last = hour.events[[event.name for _, event in hour.events].index("health_snapshot", -100)][1]
    assert "mon 0.0%" in last.text
    ledger = read_json(hour.state.costs)
    assert isinstance(ledger, dict)
    assert ledger["operations"]["job.samplers"]["calls"] == pytest.approx(180, rel=0.1)
    assert ledger["operations"]["job.health"]["calls"] == pytest.approx(30, rel=0.1)
    assert ledger["total_percentage"] == pytest.approx(100 * HOOK_S / STEP_S, rel=0.1)
    assert status_of(hour.state.root)["costs"]["budget_status"] == "ok"


def test_a_delayed_job_neither_piles_up_nor_delays_others_and_is_counted(hour: Hour) -> None:
    go_on, runs = threading.Event(), [0]

    def work() -> None:
        runs[0] += 1
        go_on.wait(60)

    hour.jobs.every("held", 10.0, work)
    hour.seconds(300)
    assert runs == [1], "six of them would wait by now, if they piled up"
    assert len(hour.at("health_snapshot")) == 5
    go_on.set()
    hour.seconds(60)
    assert runs[0] == pytest.approx(7, abs=1)
