"""Work on a schedule, in threads, never piling up: APScheduler behind the monitors' `Jobs`.

APScheduler plans in wall-clock time and would enumerate every run that a clock set from 2000 to
today has "missed", under the lock that anyone who adds a job waits for. So the interval of a job is
measured by the monotonic clock, the plan is moved with a stepped wall clock before it is read, and
nobody but the scheduler's own thread touches the plan.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from miner_guard.costs import get_global_tracker
from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.system.clock import Clock

_STEP_S = 2.0
"""The wall clock moved so much more or less than the monotonic one: it was stepped."""

_LATE_S = 5.0
"""A job that starts so much later than planned is reported."""

_EARLY_S = 1.0
"""A run so much before its time is the one that was planned for it; at most a tenth of the
interval."""

_THREADS = 8


class Scheduler:
    """The supervisor's `Jobs`. Jobs run in up to 8 threads; the same job never runs twice at a
    time.

    No method waits for a lock that is held while the plan is worked on: all are safe in the
    supervisor's thread.
    """

    def __init__(self, clock: Clock, report: Callable[[Finding], None]) -> None:
        self._clock = clock
        self._report = report
        self._offset = clock.wall() - clock.monotonic()
        self._failing: set[str] = set()
        self._due: dict[str, _Due] = {}
        self._mutex = threading.Lock()
        self._scheduler: Any = None
        self._closed = False
        self._inbox: deque[Callable[[], None]] = deque()
        """What is to be added to the plan, by the scheduler's thread."""

    def start(self) -> None:
        """Begin. Until then jobs are only remembered: the miner starts before APScheduler is
        imported."""
        from apscheduler.executors.pool import ThreadPoolExecutor
        from apscheduler.schedulers.background import BackgroundScheduler

        before_each_turn, executor = self._update_plan, ThreadPoolExecutor(_THREADS)

        class SteadyScheduler(BackgroundScheduler):  # type: ignore[misc]
            """Its plan is brought up to date before each look at it, in the same thread."""

            def _process_jobs(self) -> float | None:
                before_each_turn()
                wait_s: float | None = super()._process_jobs()
                return wait_s

            def _main_loop(self) -> None:
                super()._main_loop()
                executor.shutdown(wait=False)

        # It would print a line for each run that it leaves out; lateness is reported by ourselves,
        # as a finding.
        logging.getLogger("apscheduler").addHandler(logging.NullHandler())
        logging.getLogger("apscheduler").propagate = False
        self._scheduler = SteadyScheduler(
            timezone=timezone.utc,
            daemon=True,
            executors={"default": executor},
            job_defaults={"max_instances": 1, "coalesce": True, "misfire_grace_time": None},
        )
        self._scheduler.start()
        self._scheduler.wakeup()

    def every(
        self,
        name: str,
        seconds: float,
        work: Callable[[], None],
        *,
        first_after_s: float | None = None,
    ) -> None:
        """Run `work` every `seconds`, first after `first_after_s` (as long as the interval, if not
        given)."""
        due = _Due(self._clock, seconds, seconds if first_after_s is None else first_after_s)
        self._due[name] = due
        self._hand_over(functools.partial(self._plan, name, work, due))

    def once(self, name: str, work: Callable[[], None]) -> None:
        """Run `work` as soon as a thread is free."""
        run = functools.partial(self._run, name, work, None)
        self._hand_over(lambda: self._scheduler.add_job(run))

    def _hand_over(self, add: Callable[[], None]) -> None:
        self._inbox.append(add)
        if self._scheduler is not None:
            self._scheduler.wakeup()

    def _plan(self, name: str, work: Callable[[], None], due: _Due) -> None:
        run = functools.partial(self._run, name, work, due)
        first = datetime.fromtimestamp(self._clock.wall() + due.first_in_s(), timezone.utc)
        trigger = _trigger(due)
        self._scheduler.add_job(run, trigger, next_run_time=first, id=name, replace_existing=True)

    def _update_plan(self) -> None:
        """Move the plan with a stepped wall clock, and add what was asked for since. In the
        scheduler's thread."""
        offset = self._clock.wall() - self._clock.monotonic()
        step, self._offset = offset - self._offset, offset
        if abs(step) >= _STEP_S:
            for job in self._scheduler.get_jobs():
                if job.next_run_time is not None:
                    job.modify(next_run_time=job.next_run_time + timedelta(seconds=step))
        while self._inbox:
            self._inbox.popleft()()

    def _run(self, name: str, work: Callable[[], None], due: _Due | None) -> None:
        if self._closed:
            return
        start = self._clock.monotonic()
        if due is not None and (late := due.lateness(start)) > max(_LATE_S, due.interval_s / 2):
            self._report(make_finding("job_late", job=name, late_s=round(late, 1)))
        try:
            with get_global_tracker().track(f"job.{name}", blocking=False):
                work()
        except Exception as error:  # noqa: BLE001 - a job's defect must not end the schedule; it is reported
            self._failed(name, f"{type(error).__name__}: {error}")
            return
        finally:
            if due is not None:
                due.done(self._clock.monotonic() - start)
        with self._mutex:
            recovered = name in self._failing
            self._failing.discard(name)
        if recovered:
            self._report(make_finding("job_recovered", job=name))

    def figures(self) -> dict[str, dict[str, float | int | None]]:
        """Of each repeated job: runs, how long the last and the longest took, and how many runs
        were left out."""
        return {
            name: {"runs": due.runs, "last_s": due.last_s, "max_s": due.max_s, "missed": due.missed}
            for name, due in list(self._due.items())
        }

    def _failed(self, name: str, reason: str) -> None:
        with self._mutex:
            known = name in self._failing
            self._failing.add(name)
        if not known:
            self._report(make_finding("job_failed", job=name, reason=reason))

    def close(self) -> None:
        """No further runs; what is running is not waited for, and neither is APScheduler."""
        from apscheduler.schedulers.base import STATE_STOPPED

        self._closed = True
        if self._scheduler is not None:
            # Its own `shutdown` takes the lock of the plan and joins its thread.
            self._scheduler.state = STATE_STOPPED
            self._scheduler.wakeup()


def _trigger(due: _Due) -> Any:
    from apscheduler.triggers.base import BaseTrigger

    class SteadyTrigger(BaseTrigger):  # type: ignore[misc]
        """Always one run ahead: there is nothing to enumerate, however far the wall clock
        jumped."""

        def get_next_fire_time(self, _previous: datetime | None, now: datetime) -> datetime:
            return now + timedelta(seconds=due.wait_s())

    return SteadyTrigger()


class _Due:
    """When a job should run next, by the monotonic clock, and how its runs went."""

    def __init__(self, clock: Clock, interval_s: float, first_s: float) -> None:
        self._clock = clock
        self._first = self._next = clock.monotonic() + first_s
        self.interval_s = interval_s
        self.runs = self.missed = 0
        self.last_s: float | None = None
        self.max_s: float | None = None

    def first_in_s(self) -> float:
        """Seconds until the first run; zero where it is due already."""
        return max(0.0, self._first - self._clock.monotonic())

    def wait_s(self) -> float:
        """Seconds until the next run that is not due yet; always above zero, and without drift."""
        now = self._clock.monotonic() + min(_EARLY_S, self.interval_s / 10)
        if now < self._first:
            return self._first - self._clock.monotonic()
        past = math.floor((now - self._first) / self.interval_s)
        return self._first + (past + 1) * self.interval_s - self._clock.monotonic()

    def lateness(self, now: float) -> float:
        """Seconds after its time; from here the next run is expected."""
        late = now - self._next
        self._next = now + self.interval_s
        # A run that comes half an interval late is late; one interval late, and the one in between
        # was left out.
        self.missed += max(0, round(late / self.interval_s))
        return late

    def done(self, seconds: float) -> None:
        """A run has ended."""
        self.runs += 1
        self.last_s = round(seconds, 4)
        self.max_s = max(self.max_s or 0.0, self.last_s)
