"""The monitors' jobs: they do not pile up, failures are reported once, and a stepped wall clock
does not change an interval."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, tzinfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner_guard.eventlog.catalog import Finding
from miner_guard.guard.scheduler import Scheduler, _Due
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
        findings: list[Finding] = []
        schedulers.append(Scheduler(clock, findings.append))
        return schedulers[-1], findings

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


def test_a_failing_job_is_reported_once_and_its_recovery_too(made: Make) -> None:
    scheduler, findings = made(SystemClock())
    runs = [0]

    def work() -> None:
        runs[0] += 1
        if runs[0] < 3:
            raise RuntimeError("no answer")

    scheduler.start()
    scheduler.every("shaky", 0.03, work)
    until(lambda: runs[0] >= 4)
    assert [f.event for f in findings] == ["job_failed", "job_recovered"]
    assert "no answer" in findings[0].fields["reason"]


@pytest.mark.parametrize("step", [-3600.0, 3600.0, 26 * 365 * 86400.0])
def test_a_stepped_wall_clock_neither_delays_nor_hurries_a_job(
    made: Make, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """When the clock was set from 2000 to today, the scheduler once spent forever enumerating,
    under a lock, every run since 2000."""
    clock = Stepped()

    class Now(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(clock.wall(), tz)

    monkeypatch.setattr("apscheduler.schedulers.base.datetime", Now)
    runs: dict[str, int] = {"often": 0, "hourly": 0}

    def count(name: str) -> Callable[[], None]:
        def work() -> None:
            runs[name] += 1

        return work

    scheduler, findings = made(clock)
    scheduler.start()
    scheduler.every("often", 0.05, count("often"))
    scheduler.every("hourly", 3600.0, count("hourly"))
    until(lambda: runs["often"] >= 2)
    clock.offset += step
    seen, begin = runs["often"], time.monotonic()
    until(lambda: runs["often"] >= seen + 10)
    took = time.monotonic() - begin
    assert runs["often"] <= seen + 10 + took / 0.05 + 2, "no run is made up for"
    assert runs["hourly"] == 0
    hourly = scheduler._scheduler.get_job("hourly").next_run_time.timestamp() - clock.wall()
    assert 3500 < hourly <= 3600
    assert not [f for f in findings if f.event == "job_late"]


def test_asking_for_a_job_never_waits_for_the_plan(made: Make) -> None:
    """The supervisor must not block while APScheduler holds its lock."""
    scheduler, _ = made(SystemClock())
    scheduler.start()
    ran = threading.Event()
    asked = threading.Event()

    def ask() -> None:
        scheduler.every("repeated", 60.0, lambda: None)
        scheduler.once("single", ran.set)
        scheduler.close()
        asked.set()

    with scheduler._scheduler._jobstores_lock:
        threading.Thread(target=ask, daemon=True).start()
        assert asked.wait(10)


@given(
    st.floats(0.01, 1e4),
    st.floats(0.0, 1e4),
    st.lists(st.floats(0.0, 1e5), min_size=1, max_size=20),
)
def test_a_job_is_never_scheduled_in_the_past_or_an_interval_late(
    interval: float, first: float, pauses: list[float]
) -> None:
    clock = FakeClock()
    due = _Due(clock, interval, first)
    for pause in pauses:
        clock.advance(pause)
        assert 0.0 < due.wait_s() <= max(first, interval * 1.1) + 1e-6
