"""Work on a schedule, in threads, never piling up: APScheduler behind the parts' `Jobs`.

APScheduler plans in wall-clock time. When the wall clock steps, the plan is moved by as much, so
that an interval stays an interval.
"""

from __future__ import annotations

import functools
import logging
import threading
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

_THREADS = 8


class Scheduler:
    """The supervisor's `Jobs`. Jobs run in up to 8 threads; the same job never runs twice at a
    time."""

    def __init__(self, clock: Clock, report: Callable[[Finding], None]) -> None:
        self._clock = clock
        self._report = report
        self._offset = clock.wall() - clock.monotonic()
        self._failing: set[str] = set()
        self._due: dict[str, _Due] = {}
        self._mutex = threading.Lock()
        self._scheduler: Any = None
        self._early: list[Callable[[], None]] | None = []

    def start(self) -> None:
        """Begin. Until then jobs are only remembered: the miner starts before APScheduler is
        imported."""
        from apscheduler.executors.pool import ThreadPoolExecutor
        from apscheduler.schedulers.background import BackgroundScheduler

        # It would print a line for each run that it leaves out; lateness is reported by ourselves,
        # as a finding.
        logging.getLogger("apscheduler").addHandler(logging.NullHandler())
        logging.getLogger("apscheduler").propagate = False
        self._scheduler = BackgroundScheduler(
            timezone=timezone.utc,
            daemon=True,
            executors={"default": ThreadPoolExecutor(_THREADS)},
            job_defaults={"max_instances": 1, "coalesce": True, "misfire_grace_time": None},
        )
        self._scheduler.start()
        with self._mutex:
            early, self._early = self._early or [], None
        for add in early:
            add()

    def _add(self, add: Callable[[], None]) -> None:
        with self._mutex:
            if self._early is not None:
                self._early.append(add)
                return
        add()

    def every(
        self,
        name: str,
        seconds: float,
        work: Callable[[], None],
        *,
        first_after_s: float | None = None,
    ) -> None:
        """Run `work` every `seconds`, first after `first_after_s` (as long as the interval, if not
        said)."""
        wait = seconds if first_after_s is None else first_after_s
        self._add(lambda: self._plan(name, seconds, work, wait))

    def _plan(self, name: str, seconds: float, work: Callable[[], None], wait: float) -> None:
        first = datetime.fromtimestamp(self._clock.wall() + wait, timezone.utc)
        due = self._due[name] = _Due(self._clock.monotonic() + wait, seconds)
        run = functools.partial(self._run, name, work, due)
        self._scheduler.add_job(
            run, "interval", seconds=seconds, next_run_time=first, id=name, replace_existing=True
        )

    def once(self, name: str, work: Callable[[], None]) -> None:
        """Run `work` as soon as a thread is free."""
        self._add(lambda: self._scheduler.add_job(functools.partial(self._run, name, work, None)))

    def tick(self) -> None:
        """Notice a stepped wall clock and move the plan with it. Called about once a second."""
        offset = self._clock.wall() - self._clock.monotonic()
        step, self._offset = offset - self._offset, offset
        if abs(step) < _STEP_S or self._scheduler is None:
            return
        for job in self._scheduler.get_jobs():
            if job.next_run_time is not None:
                job.modify(next_run_time=job.next_run_time + timedelta(seconds=step))

    def _run(self, name: str, work: Callable[[], None], due: _Due | None) -> None:
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
            self._report(make_finding("sampler_recovered", sampler=name))

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
            self._report(make_finding("sampler_failed", sampler=name, reason=reason))

    def close(self) -> None:
        """No further runs; what is running is not waited for."""
        if self._scheduler is not None:
            # `shutdown` in the middle of APScheduler's look at its jobs fails in its thread: after
            # `pause` there is no further look, and `get_jobs` waits for the one that may be under
            # way.
            self._scheduler.pause()
            self._scheduler.get_jobs()
            self._scheduler.shutdown(wait=False)


class _Due:
    """When a job should run next, by the monotonic clock, and how its runs went."""

    def __init__(self, first: float, interval_s: float) -> None:
        self._next = first
        self.interval_s = interval_s
        self.runs = self.missed = 0
        self.last_s: float | None = None
        self.max_s: float | None = None

    def lateness(self, now: float) -> float:
        late = now - self._next
        self._next = now + self.interval_s
        # A run that comes half an interval late is late; one interval late, and the one in between
        # was left out.
        self.missed += max(0, round(late / self.interval_s))
        return late

    def done(self, seconds: float) -> None:
        self.runs += 1
        self.last_s = round(seconds, 4)
        self.max_s = max(self.max_s or 0.0, self.last_s)
