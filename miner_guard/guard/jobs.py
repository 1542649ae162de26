"""Runs the monitors' jobs in threads: APScheduler plans them, and no job ever runs twice at once.

Each run plans its successor with a `DateTrigger`. An `IntervalTrigger` would enumerate every run
that a jump of the wall clock skipped: from the year 2000 to today, a billion for a job of 0.5 s.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.date import DateTrigger

from miner_guard.costs import get_global_tracker
from miner_guard.record.emitter import bound_contextvars
from miner_guard.record.events import Event, degraded, recovered
from miner_guard.system.clock import Clock

_STEP_S = 2.0
"""If the wall clock and the monotonic clock drift apart by this much between two checks, the wall
clock was stepped."""

_THREADS = 8


@dataclass
class _Job:
    """A job; all times are monotonic."""

    name: str
    interval_s: float
    work: Callable[[], None]
    due: float
    running: bool = False
    failing: bool = False


class JobSchedule:
    """The monitors' `Jobs`, in up to 8 threads. All methods may be called from any thread."""

    def __init__(self, clock: Clock, report: Callable[[Event], None]) -> None:
        self._clock, self._report = clock, report
        self._offset = clock.wall() - clock.monotonic()
        self._repeated: dict[str, _Job] = {}
        self._mutex = threading.Lock()
        self._closed = False
        logging.getLogger("apscheduler").setLevel(logging.CRITICAL)
        self._scheduler = self._new_scheduler()

    def _new_scheduler(self) -> BackgroundScheduler:
        return BackgroundScheduler(
            timezone=timezone.utc,
            executors={"default": ThreadPoolExecutor(_THREADS)},
            job_defaults={"max_instances": 1, "coalesce": True, "misfire_grace_time": None},
        )

    def start(self) -> None:
        """Start the schedule. Until then, APScheduler only queues the jobs."""
        self._scheduler.start()
        self._thread = next(t for t in threading.enumerate() if t.name == "APScheduler")

    def every(
        self,
        name: str,
        seconds: float,
        work: Callable[[], None],
        *,
        first_after_s: float | None = None,
    ) -> None:
        """Run `work` every `seconds`, first after `first_after_s` (default: one interval)."""
        first_s = seconds if first_after_s is None else first_after_s
        job = _Job(name, seconds, work, self._clock.monotonic() + first_s)
        self._repeated[name] = job
        self._plan(job)

    def once(self, name: str, work: Callable[[], None]) -> None:
        """Run `work` as soon as a thread is free."""
        job = _Job(name, 0.0, work, self._clock.monotonic())
        self._scheduler.add_job(functools.partial(self._measured, job), DateTrigger())

    def check(self) -> None:
        """After a step of the wall clock or the death of the scheduler's thread, plan all jobs
        again. Call this about once a second."""
        offset = self._clock.wall() - self._clock.monotonic()
        step, self._offset = offset - self._offset, offset
        dead = not self._thread.is_alive() and not self._closed
        if dead:
            self._report(degraded("the thread that starts the jobs died; restarted"))
            self._scheduler = self._new_scheduler()
            self.start()
        if dead or abs(step) >= _STEP_S:
            for job in list(self._repeated.values()):
                if not job.running:
                    self._plan(job)

    def _plan(self, job: _Job) -> None:
        wait = timedelta(seconds=max(0.0, job.due - self._clock.monotonic()))
        when = datetime.fromtimestamp(self._clock.wall(), timezone.utc) + wait
        run = functools.partial(self._run, job)
        self._scheduler.add_job(run, DateTrigger(when), id=job.name, replace_existing=True)

    def _run(self, job: _Job) -> None:
        with self._mutex:
            # A step of the clock may have planned a run that had just started.
            if self._closed or job.running:
                return
            job.running = True
        start = self._clock.monotonic()
        try:
            self._measured(job)
        finally:
            # Keep the rhythm, but do not make up for missed runs.
            late = start - job.due >= job.interval_s
            job.due = (start if late else job.due) + job.interval_s
            job.running = False
            if not self._closed:
                self._plan(job)

    def _measured(self, job: _Job) -> None:
        """Run a job's work. An exception is reported once and does not end the schedule."""
        failure = None
        try:
            with (
                bound_contextvars(job=job.name),
                get_global_tracker().track(f"job.{job.name}", blocking=False),
            ):
                job.work()
        except BaseException as error:  # noqa: BLE001 - not even a SystemExit ends the schedule; it is reported
            failure = f"{type(error).__name__}: {error}"
        failing, job.failing = job.failing, failure is not None
        name = job.name
        if failure is not None and not failing:
            self._report(degraded(f"job {name} failed: {failure}", job=name))
        elif failure is None and failing:
            self._report(recovered(f"job {name} works again", job=name))

    def close(self) -> None:
        """Start no further runs. Does not wait for running jobs."""
        self._closed = True
        if self._scheduler.running:
            # A shutdown while the scheduler's thread processes its jobs makes that thread raise
            # JobLookupError. A paused scheduler begins no further pass, and removing the jobs waits
            # for the current one.
            self._scheduler.pause()
            self._scheduler.remove_all_jobs()
            self._scheduler.shutdown(wait=False)
