"""Runs scheduled jobs in threads, never two runs of the same job at once. Implements the monitors'
`Jobs` with APScheduler.

APScheduler plans in wall-clock time. If the clock jumped from 2000 to today, APScheduler would
enumerate every "missed" run while holding the lock needed to add a job. So the monotonic clock
measures intervals, the scheduler shifts the plan after a wall-clock step before it reads the plan,
and only the scheduler's thread touches the plan.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from miner_guard.costs import get_global_tracker
from miner_guard.eventlog.catalog import Finding
from miner_guard.eventlog.emitter import bound_contextvars
from miner_guard.record.events import event
from miner_guard.system.clock import Clock
from miner_guard.system.lazy_import import defer_import, without_plugins

_STEP_S = 2.0
"""If the wall clock and the monotonic clock drift apart by this much between two passes, the wall
clock was stepped."""

_LATE_S = 5.0
"""Report a job that starts more than this late (or late by more than half its interval, if that is
longer)."""

_EARLY_S = 1.0
"""A run counts as the planned one if it starts at most this early (or a tenth of the interval, if
that is less)."""

_THREADS = 8


class _NoProcessPool(Exception):
    """Stands in for the error type of a process pool that the guard never creates."""


class Scheduler:
    """The supervisor's `Jobs`. Jobs run in up to 8 threads; runs of the same job never overlap.

    No method waits for the lock that APScheduler holds while it changes the plan, so the
    supervisor's thread may call all of them.
    """

    def __init__(self, clock: Clock, report: Callable[[Finding], None]) -> None:
        self._clock = clock
        self._report = report
        self._offset = clock.wall() - clock.monotonic()
        self._failing: set[str] = set()
        self._due: dict[str, _Due] = {}
        self._mutex = threading.Lock()
        self._scheduler: Any = None
        self._changed = threading.Event()
        self._closed = False
        self._inbox: deque[Callable[[], None]] = deque()
        """Jobs that the scheduler's thread has yet to add to the plan."""

    def start(self) -> None:
        """Start the schedule. Until then jobs are only queued, so that the miner starts before the
        guard spends time importing APScheduler."""
        with (
            # No job is a coroutine or runs in a process pool, and asyncio alone takes 3 MB.
            defer_import("asyncio", iscoroutinefunction=inspect.iscoroutinefunction),
            defer_import("multiprocessing"),
            defer_import("concurrent.futures.process", BrokenProcessPool=_NoProcessPool),
            # APScheduler registers even its own triggers and stores as plugins. The guard passes
            # them as objects, so it needs no plugin.
            without_plugins(),
        ):
            from apscheduler.executors.pool import ThreadPoolExecutor
            from apscheduler.schedulers.base import BaseScheduler

        changed, executor = self._changed, ThreadPoolExecutor(_THREADS)

        class SteadyScheduler(BaseScheduler):  # type: ignore[misc]
            """Runs in the guard's own thread, which updates the plan before each pass.

            It follows APScheduler's recipe for a scheduler: `wakeup` makes the thread call
            `_process_jobs`, which starts the due jobs and returns the seconds until the next one.
            """

            def wakeup(self) -> None:
                changed.set()

            def shutdown(self, wait: bool = True) -> None:
                super().shutdown(wait)
                changed.set()

            def start_due(self) -> float | None:
                wait_s: float | None = self._process_jobs()
                return wait_s

        # APScheduler logs a line for each skipped run; the guard reports lateness as a finding
        # instead.
        logging.getLogger("apscheduler").addHandler(logging.NullHandler())
        logging.getLogger("apscheduler").propagate = False
        self._scheduler = SteadyScheduler(
            timezone=timezone.utc,
            executors={"default": executor},
            job_defaults={"max_instances": 1, "coalesce": True, "misfire_grace_time": None},
        )
        self._scheduler.start()
        threading.Thread(target=self._turn, args=(executor,), name="schedule", daemon=True).start()

    def _turn(self, executor: Any) -> None:
        wait_s: float | None = 0.0
        while not self._closed:
            self._changed.wait(wait_s)
            self._changed.clear()
            self._update_plan()
            wait_s = self._scheduler.start_due()
        executor.shutdown(wait=False)

    def every(
        self,
        name: str,
        seconds: float,
        work: Callable[[], None],
        *,
        first_after_s: float | None = None,
    ) -> None:
        """Run `work` every `seconds`, first after `first_after_s` (default: one interval)."""
        due = _Due(self._clock, seconds, seconds if first_after_s is None else first_after_s)
        self._due[name] = due
        self._hand_over(functools.partial(self._plan, name, work, due))

    def once(self, name: str, work: Callable[[], None]) -> None:
        """Run `work` as soon as a thread is free."""
        run = functools.partial(self._run, name, work, None)

        def add() -> None:
            from apscheduler.triggers.date import DateTrigger

            # Pass the trigger as an object: for a name, APScheduler would search for a plugin.
            self._scheduler.add_job(run, DateTrigger(timezone=timezone.utc))

        self._hand_over(add)

    def _hand_over(self, add: Callable[[], None]) -> None:
        self._inbox.append(add)
        self._changed.set()

    def _plan(self, name: str, work: Callable[[], None], due: _Due) -> None:
        run = functools.partial(self._run, name, work, due)
        first = datetime.fromtimestamp(self._clock.wall() + due.first_in_s(), timezone.utc)
        trigger = _trigger(due)
        self._scheduler.add_job(run, trigger, next_run_time=first, id=name, replace_existing=True)

    def _update_plan(self) -> None:
        """Shift the plan after a wall-clock step, and add the queued jobs. Scheduler thread
        only."""
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
            self._report(
                event(
                    "job_late",
                    "warning",
                    f"JOB LATE: {name} by {round(late, 1):.1f}s",
                    job=name,
                    late_s=round(late, 1),
                )
            )
        try:
            with (
                bound_contextvars(job=name),
                get_global_tracker().track(f"job.{name}", blocking=False),
            ):
                work()
        except Exception as error:  # noqa: BLE001 - a bug in a job must not end the schedule; the error is reported
            self._failed(name, f"{type(error).__name__}: {error}")
            return
        finally:
            if due is not None:
                due.done(self._clock.monotonic() - start)
        with self._mutex:
            recovered = name in self._failing
            self._failing.discard(name)
        if recovered:
            self._report(event("job_recovered", "info", f"JOB RECOVERED: {name}", job=name))

    def figures(self) -> dict[str, dict[str, float | int | None]]:
        """Return, for each repeated job, the number of runs, the duration of the last and of the
        longest run in seconds, and the number of missed runs."""
        return {
            name: {"runs": due.runs, "last_s": due.last_s, "max_s": due.max_s, "missed": due.missed}
            for name, due in list(self._due.items())
        }

    def _failed(self, name: str, reason: str) -> None:
        with self._mutex:
            known = name in self._failing
            self._failing.add(name)
        if not known:
            self._report(
                event(
                    "job_failed",
                    "warning",
                    f"JOB FAILED: {name}: {reason}",
                    job=name,
                    reason=reason,
                )
            )

    def close(self) -> None:
        """Start no further runs. Waits neither for running jobs nor for APScheduler."""
        # APScheduler's `shutdown` would take the plan's lock.
        self._closed = True
        self._changed.set()


def _trigger(due: _Due) -> Any:
    from apscheduler.triggers.base import BaseTrigger

    class SteadyTrigger(BaseTrigger):  # type: ignore[misc]
        """Plans only the next run, so that APScheduler has nothing to enumerate after the wall
        clock jumps."""

        def get_next_fire_time(self, _previous: datetime | None, now: datetime) -> datetime:
            return now + timedelta(seconds=due.wait_s())

    return SteadyTrigger()


class _Due:
    """A job's next due time on the monotonic clock, and statistics of its runs."""

    def __init__(self, clock: Clock, interval_s: float, first_s: float) -> None:
        self._clock = clock
        self._first = self._next = clock.monotonic() + first_s
        self.interval_s = interval_s
        self.runs = self.missed = 0
        self.last_s: float | None = None
        self.max_s: float | None = None

    def first_in_s(self) -> float:
        """Seconds until the first run; zero if it is already due."""
        return max(0.0, self._first - self._clock.monotonic())

    def wait_s(self) -> float:
        """Seconds until the next planned run: always positive, and without accumulated drift."""
        now = self._clock.monotonic() + min(_EARLY_S, self.interval_s / 10)
        if now < self._first:
            return self._first - self._clock.monotonic()
        past = math.floor((now - self._first) / self.interval_s)
        return self._first + (past + 1) * self.interval_s - self._clock.monotonic()

    def lateness(self, now: float) -> float:
        """Return how late this run is in seconds, and expect the next run one interval from
        now."""
        late = now - self._next
        self._next = now + self.interval_s
        # Round to whole intervals: a run that is half an interval late or more implies a missed
        # run.
        self.missed += max(0, round(late / self.interval_s))
        return late

    def done(self, seconds: float) -> None:
        """Record a completed run."""
        self.runs += 1
        self.last_s = round(seconds, 4)
        self.max_s = max(self.max_s or 0.0, self.last_s)
