"""The parts' jobs: no pile-up, failures told once, a stepped wall clock does not move an
interval."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from miner_guard.eventlog.catalog import Finding
from miner_guard.supervisor.scheduler import Scheduler
from miner_guard.system.clock import FakeClock, SystemClock
from tests.support.waiting import until


class Stepped(SystemClock):
    """The host's clocks, with a wall clock that can be stepped."""

    def __init__(self) -> None:
        self.offset = 0.0

    def wall(self) -> float:
        return time.time() + self.offset


@pytest.fixture
def made() -> Iterator[Callable[..., tuple[Scheduler, list[Finding]]]]:
    schedulers: list[Scheduler] = []

    def make(clock: SystemClock | FakeClock) -> tuple[Scheduler, list[Finding]]:
        told: list[Finding] = []
        schedulers.append(Scheduler(clock, told.append))
        return schedulers[-1], told

    yield make
    for scheduler in schedulers:
        scheduler.close()


Make = Callable[..., tuple[Scheduler, list[Finding]]]


def test_what_was_asked_for_before_the_start_runs_after_it(made: Make) -> None:
    scheduler, _ = made(SystemClock())
    ran = threading.Event()
    scheduler.once("early", ran.set)
    assert not ran.wait(0.05)
    scheduler.start()
    assert ran.wait(10)


def test_a_slow_job_never_runs_twice_at_a_time(made: Make) -> None:
    scheduler, _ = made(SystemClock())
    running, most, runs = [0], [0], [0]

    def work() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.15)
        running[0] -= 1
        runs[0] += 1

    scheduler.start()
    scheduler.every("slow", 0.05, work)
    until(lambda: runs[0] >= 3)
    assert most[0] == 1


def test_a_failing_job_is_told_once_and_its_recovery_too(made: Make) -> None:
    scheduler, told = made(SystemClock())
    runs = [0]

    def work() -> None:
        runs[0] += 1
        if runs[0] < 3:
            raise RuntimeError("no answer")

    scheduler.start()
    scheduler.every("shaky", 0.03, work)
    until(lambda: runs[0] >= 4)
    assert [f.event for f in told] == ["sampler_failed", "sampler_recovered"]
    assert "no answer" in told[0].fields["reason"]


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_stepped_wall_clock_neither_delays_nor_hurries_a_job(made: Make, step: float) -> None:
    clock = Stepped()
    scheduler, told = made(clock)
    scheduler.start()
    scheduler.every("hourly", 3600.0, lambda: None)
    before = scheduler._scheduler.get_jobs()[0].next_run_time.timestamp() - clock.wall()
    clock.offset += step
    scheduler.tick()
    after = scheduler._scheduler.get_jobs()[0].next_run_time.timestamp() - clock.wall()
    assert after == pytest.approx(before, abs=5.0)
    assert not [f for f in told if f.event == "job_late"]
