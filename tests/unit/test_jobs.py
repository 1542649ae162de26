"""The monitors' jobs: they do not pile up, failures are reported once, and a stepped wall clock
does not change an interval."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, tzinfo

import pytest

from miner_guard.guard.jobs import JobSchedule
from miner_guard.record.events import Event
from miner_guard.system.clock import SystemClock
from tests.support.waiting import until


class SteppableClock(SystemClock):
    """The host's clocks, with a wall clock that can be stepped."""

    def __init__(self) -> None:
        self.offset = 0.0

    def wall(self) -> float:
        return time.time() + self.offset


@pytest.fixture
def clock() -> SteppableClock:
    return SteppableClock()


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def jobs(clock: SteppableClock, events: list[Event]) -> Iterator[JobSchedule]:
    made = JobSchedule(clock, events.append)
    yield made
    made.close()


def test_jobs_added_before_the_start_run_after_it(jobs: JobSchedule) -> None:
    ran = threading.Event()
    jobs.once("early", ran.set)
    assert not ran.wait(0.05)
    jobs.start()
    assert ran.wait(10)


@pytest.mark.parametrize("step", [0.0, -3600.0])
def test_a_slow_job_never_runs_twice_at_a_time(
    jobs: JobSchedule, clock: SteppableClock, step: float
) -> None:
    running, most, runs = [0], [0], [0]

    def work() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        clock.offset += step
        jobs.check()
        time.sleep(0.15)
        running[0] -= 1
        runs[0] += 1

    jobs.start()
    jobs.every("slow", 0.05, work)
    until(lambda: runs[0] >= 3)
    assert most[0] == 1


@pytest.mark.parametrize("error", [RuntimeError("no answer"), SystemExit("no answer")])
def test_a_failing_job_is_reported_once_and_its_recovery_too(
    jobs: JobSchedule, events: list[Event], error: BaseException
) -> None:
    """A job once died for good when it raised SystemExit."""
    runs = [0]

    def work() -> None:
        runs[0] += 1
        if runs[0] < 3:
            raise error

    jobs.start()
    jobs.every("shaky", 0.03, work)
    until(lambda: runs[0] >= 4)
    assert [(f.name, f.level) for f in events] == [
        ("guard_degraded", "warning"),
        ("guard_degraded", "info"),
    ]
    assert "no answer" in events[0].text


@pytest.mark.parametrize("step", [-3600.0, 3600.0, 26 * 365 * 86400.0])
def test_a_stepped_wall_clock_neither_delays_nor_hurries_a_job(
    jobs: JobSchedule,
    clock: SteppableClock,
    events: list[Event],
    monkeypatch: pytest.MonkeyPatch,
    step: float,
) -> None:
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

    jobs.start()
    jobs.every("often", 0.05, count("often"))
    jobs.every("hourly", 3600.0, count("hourly"))
    until(lambda: runs["often"] >= 2)
    clock.offset += step
    jobs.check()
    before, begin = runs["often"], time.monotonic()
    until(lambda: runs["often"] >= before + 10)
    took = time.monotonic() - begin
    assert runs["often"] <= before + 10 + took / 0.05 + 2, "no run is made up for"
    assert runs["hourly"] == 0
    hourly = jobs._scheduler.get_job("hourly").next_run_time.timestamp() - clock.wall()
    assert 3500 < hourly <= 3600
    assert events == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_scheduler_whose_thread_dies_is_replaced_and_reported(
    jobs: JobSchedule, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [0]

    def work() -> None:
        runs[0] += 1

    def die() -> None:
        raise MemoryError

    jobs.start()
    jobs.every("often", 0.03, work)
    until(lambda: runs[0] >= 1)
    monkeypatch.setattr(jobs._scheduler, "_process_jobs", die)
    jobs._scheduler.wakeup()
    jobs._thread.join(10)
    before = runs[0]
    jobs.check()
    until(lambda: runs[0] > before + 2)
    assert [event.name for event in events] == ["guard_degraded"]


def test_closing_amid_due_jobs_raises_nothing_in_the_schedulers_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    ran = 0

    def work() -> None:
        nonlocal ran
        ran += 1

    for _ in range(60):
        jobs = JobSchedule(SystemClock(), lambda _: None)
        for number in range(20):
            jobs.once(f"job {number}", work)
        jobs.start()
        jobs.close()
    assert ran > 0, "some closed amid their jobs"
    assert raised == []
