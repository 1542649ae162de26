"""MonitoringCostTracker: accounts for every monitoring operation, warns, and enforces a budget
(source 000)."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from miner_guard import state_dir
from miner_guard.costs import table
from miner_guard.costs.operation import Operation, fair_cap, percent
from miner_guard.costs.presets import Budget
from miner_guard.eventlog.catalog import Finding
from miner_guard.eventlog.write_errors import WriteOutage
from miner_guard.record.events import event
from miner_guard.system.clock import Clock, SystemClock, iso_utc

FILE = "monitoring_costs.json"
_MAX_OPERATIONS = 256
_WRITE_EVERY_S = 5.0
_EVIDENCE_S = 3.0
"""Monitoring does not count as over budget until it has blocked training for this long (5 % of a
minute): a percentage of such a short time is meaningless."""

_ELSEWHERE = -1
"""The place of another process's call among this process's threads."""

_RELAX_RATIO = 0.8
"""Throttling ends when the requested intervals would take less than this share of the budget."""

_LEVELS = {"ok": 0, "warning": 1, "critical": 2}

T = TypeVar("T")


def say_on_stderr(finding: Finding) -> None:
    """Print a warning on stderr: the default `report` of a tracker outside a guard."""
    sys.stderr.write(f"{finding.level.upper()} | {finding.text}\n")


class MonitoringCostTracker:
    """Tracks what monitoring costs, warns, and throttles if the budget allows that. Thread-safe.

    Shares are percentages of training time: the time since `start`, minus the time that monitoring
    blocked training.
    """

    def __init__(
        self,
        output_dir: str | Path | None = None,
        *,
        budget: Budget | None = None,
        clock: Clock | None = None,
        report: Callable[[Finding], None] = say_on_stderr,
        on_record: Callable[[str, float, bool], None] | None = None,
        ledger: Path | None = None,
    ) -> None:
        """`output_dir`: where to write monitoring_costs.json; None: nowhere. `report` receives the
        warnings; `on_record(operation, seconds, blocking)` is called for each recorded call.
        `ledger`: another process's monitoring_costs.json, which `get_report` returns until this
        tracker records an operation."""
        self.budget = budget or Budget()
        self._file = None if output_dir is None else Path(output_dir) / FILE
        self._clock = clock or SystemClock()
        self._report = report
        self._on_record = on_record
        self._ledger = ledger
        self._mutex = threading.RLock()
        self._operations: dict[str, Operation] = {}
        self._start = self._clock.monotonic()
        self._training_s: Callable[[], float] | None = None
        self._measured_step_s: Callable[[], float | None] = lambda: None
        self._step_time_s: float | None = None
        self._steps: tuple[int, float] | None = None
        self._level = "ok"
        self._running: dict[int, tuple[str, float]] = {}
        """The outermost blocking call that each thread is in: operation, and when it began; under
        `_ELSEWHERE`, the call that another process is in."""

        self._warned_open = False
        self._written = float("-inf")
        self._outage = WriteOutage(FILE)
        if self._file is not None:
            # `record` writes the file at most every 5 s; the process writes the rest when it exits.
            atexit.register(_write_at_exit, weakref.ref(self))

    # tracking

    @contextlib.contextmanager
    def track(self, operation: str, *, blocking: bool = True) -> Iterator[None]:
        """Time one call: wall time if blocking, this thread's CPU time with `blocking=False`."""
        clock = self._clock.monotonic if blocking else time.thread_time
        start, thread = clock(), threading.get_ident()
        outermost = blocking and self._running.setdefault(thread, (operation, start))[1] == start
        try:
            with _shown_to_guard(operation) if blocking else contextlib.nullcontext():
                yield
        finally:
            if outermost:
                self._running.pop(thread, None)
            self.record(operation, clock() - start, blocking=blocking)

    def running(self, operation: str, since: float | None) -> None:
        """Count a call that another process is in, from monotonic time `since`; None: in none."""
        with self._mutex:
            if since is None:
                self._running.pop(_ELSEWHERE, None)
                return
            changed = self._running.get(_ELSEWHERE) != (operation, since)
            self._running[_ELSEWHERE] = (operation, since)
            if changed:
                self._warned_open = False
            seconds, limit = self._clock.monotonic() - since, self.budget.operation_warn_s
            findings = self._judged()
            if seconds > limit and not self._warned_open:
                self._warned_open = True
                words = f"MONITORING SLOW: in {operation} for {seconds:.0f}s (limit {limit:.0f}s)"
                findings.append(_slow(words, operation, seconds, limit))
        for finding in findings:
            self._report(finding)

    def record(
        self, operation: str, seconds: float, *, blocking: bool = True, calls: int = 1
    ) -> None:
        """Add `calls` calls that were timed elsewhere and took `seconds` in total."""
        findings: list[Finding] = []
        with self._mutex:
            account = self._account(operation)
            account.add(max(0.0, seconds), blocking=blocking, calls=max(1, calls))
            account.last_done = self._clock.monotonic()
            limit = self.budget.operation_warn_s
            if blocking and account.last_s > limit:
                words = (
                    f"MONITORING SLOW: {operation} took {account.last_s:.1f}s (limit {limit:.0f}s)"
                )
                findings.append(_slow(words, operation, account.last_s, limit))
            findings += self._judged()
        for finding in findings:
            self._report(finding)
        if self._on_record is not None:
            self._on_record(operation, seconds, blocking)
        self._write_now_and_then()

    def _account(self, operation: str) -> Operation:
        if operation not in self._operations and len(self._operations) >= _MAX_OPERATIONS:
            operation = "other"
        return self._operations.setdefault(operation, Operation())

    def _judged(self) -> list[Finding]:
        """Update the budget's status; return a finding if it has become worse."""
        share = self.share_pct()
        level = self._status(share)
        worse = _LEVELS[level] > _LEVELS[self._level]
        self._level = level
        if not worse:
            return []
        limit = self.budget.critical_pct if level == "critical" else self.budget.budget_pct
        spent = self._blocking_by_operation()
        words = f"MONITORING OVER BUDGET: {share:.1f}% (limit {limit:.0f}%)"
        return [
            event(
                "monitoring_over_budget",
                level,
                words,
                share_pct=share,
                limit_pct=limit,
                most_expensive=max(spent, key=spent.__getitem__),
            )
        ]

    def _status(self, share_pct: float) -> str:
        return self.budget.status(share_pct) if self.blocking_s() >= _EVIDENCE_S else "ok"

    def _blocking_by_operation(self) -> dict[str, float]:
        """Seconds that each operation has blocked training, unfinished calls included."""
        now = self._clock.monotonic()
        spent = {name: account.blocking_s for name, account in self._operations.items()}
        for operation, since in list(self._running.values()):
            spent[operation] = spent.get(operation, 0.0) + max(0.0, now - since)
        return spent

    # budget

    def training_time(
        self, source: Callable[[], float], step_time: Callable[[], float | None] = lambda: None
    ) -> None:
        """Take the training time, in seconds, from `source`: only the supervisor knows when the
        miner was down. `step_time`: seconds of training per step, or None while unknown."""
        self._training_s, self._measured_step_s = source, step_time

    def blocking_s(self) -> float:
        """Seconds that monitoring has blocked training, unfinished calls included."""
        with self._mutex:
            return sum(self._blocking_by_operation().values())

    def finished_s(self) -> float:
        """Seconds that finished calls have blocked training."""
        with self._mutex:
            return sum(account.blocking_s for account in self._operations.values())

    def background_s(self, prefix: str = "") -> float:
        """CPU seconds used alongside training by operations whose names start with `prefix`."""
        with self._mutex:
            return sum(
                a.background_s for name, a in self._operations.items() if name.startswith(prefix)
            )

    def training_s(self) -> float:
        """Seconds of training, excluding the time that monitoring blocked it."""
        if self._training_s is not None:
            return max(0.0, self._training_s())
        return max(0.0, self._clock.monotonic() - self._start - self.blocking_s())

    def share_pct(self) -> float:
        """The time for which monitoring blocked training, as a percentage of training time."""
        with self._mutex:
            return percent(self.blocking_s(), self.training_s())

    def is_over_budget(self) -> bool:
        """Return True if monitoring takes more training time than the budget allows, and at least
        3 s: a share of less says nothing."""
        return self._status(self.share_pct()) != "ok"

    # throttling

    def due(
        self,
        operation: str,
        *,
        every_s: float | None = None,
        every_steps: int | None = None,
        step: int | None = None,
    ) -> bool:
        """Return True if `operation` is due. Call it on every step, or at any other rate.

        Pass either `every_s`, or `every_steps` and the current `step`. If the budget allows
        throttling, an expensive operation waits longer while its next call would take monitoring
        over budget. The answer depends on this process's clock: for an operation with a collective,
        ask on one rank and broadcast. Raises ValueError without an interval.
        """
        throttled: Finding | None = None
        with self._mutex:
            account = self._account(operation)
            now = self._clock.monotonic()
            self._learn_step_time(step, now)
            if every_steps is not None and step is not None:
                last = account.last_step
                # Inner steps restart at 0 with each outer step.
                ready = (
                    step % every_steps == 0
                    if last is None or step < last
                    else step - last >= every_steps
                )
                account.asked_s = (
                    None if self._step_time_s is None else every_steps * self._step_time_s
                )
            elif every_s is not None:
                ready = account.last_done is None or now - account.last_done >= every_s
                account.asked_s = every_s
            else:
                raise ValueError("due needs every_s, or every_steps and step")
            if ready and self.budget.throttle and account.asked_s is not None:
                ready, throttled = self._allowed(operation, account)
            if ready and step is not None:
                account.last_step = step
        if throttled is not None:
            self._report(throttled)
        return ready

    def _learn_step_time(self, step: int | None, now: float) -> None:
        """Update the training seconds per step from the steps passed to `due`."""
        if step is None:
            return
        training = self.training_s()
        if self._steps is None or step < self._steps[0]:
            self._steps = (step, training)
        elif step > self._steps[0]:
            self._step_time_s = (training - self._steps[1]) / (step - self._steps[0])

    def _allowed(self, operation: str, account: Operation) -> tuple[bool, Finding | None]:
        assert account.asked_s is not None
        planned = self._planned_pct()
        cap = fair_cap(planned.values(), self.budget.budget_pct)
        asked = account.asked_s
        if account.throttled and sum(planned.values()) <= _RELAX_RATIO * self.budget.budget_pct:
            account.throttled = False
            return True, event(
                "monitoring_relaxed",
                "info",
                f"MONITORING RELAXED: {operation} every {asked:.0f}s again",
                operation=operation,
                interval_s=asked,
            )
        if not account.recent_s or planned[operation] <= cap:
            return True, None
        after = percent(self.blocking_s() + account.recent_s, self.training_s())
        if after <= self.budget.budget_pct:
            return True, None
        if account.throttled:
            return False, None
        account.throttled = True
        stretched = 100 * account.recent_s / cap
        return False, event(
            "monitoring_throttled",
            "warning",
            f"MONITORING THROTTLED: {operation} every {stretched:.0f}s instead of {asked:.0f}s",
            operation=operation,
            interval_s=stretched,
            asked_s=asked,
        )

    def _planned_pct(self) -> dict[str, float]:
        """Each operation's share of training time at its requested interval, or its measured share
        if it has no interval."""
        training = self.training_s()
        planned = {}
        for name, account in self._operations.items():
            cost, period = (
                (account.recent_s, account.asked_s)
                if account.asked_s
                else (account.blocking_s, training)
            )
            planned[name] = percent(cost, period)
        return planned

    def portion(
        self, operation: str, items: Iterable[T], *, limit_s: float | None = None
    ) -> Iterator[T]:
        """Yield `items` until the time limit is reached, so that a long validation runs partially
        instead of being skipped.

        The limit is `limit_s`, by default the budget's `operation_warn_s`. Records the time as one
        call of `operation`.
        """
        limit = self.budget.operation_warn_s if limit_s is None else limit_s
        with self.track(operation):
            start = self._clock.monotonic()
            for item in items:
                if self._clock.monotonic() - start >= limit:
                    return
                yield item

    # reporting

    def get_report(self) -> dict[str, Any]:
        """The costs so far, in the format of monitoring_costs.json. `budget_status` is `unknown` if
        nothing was recorded here and the ledger can't be read."""
        with self._mutex:
            if not self._operations and self._ledger is not None:
                stored = state_dir.read_json(self._ledger)
                if isinstance(stored, dict) and isinstance(stored.get("operations"), dict):
                    return stored
            known = bool(self._operations or self._running) or self._ledger is None
            spent = self._blocking_by_operation()
            accounts = {name: self._operations.get(name) or Operation() for name in spent}
            training = self.training_s()
            share = percent(self.blocking_s(), training)
            return {
                "budget_status": self._status(share) if known else "unknown",
                "total_percentage": round(share, 4),
                "budget_percentage": self.budget.budget_pct,
                "critical_percentage": self.budget.critical_pct,
                "throttle": self.budget.throttle,
                "total_time": round(self.blocking_s(), 6),
                "background_time": round(self.background_s(), 6),
                "training_time": round(training, 3),
                "step_time": self._step_time_s or self._measured_step_s(),
                "updated": iso_utc(self._clock.wall()),
                "operations": {
                    name: account.as_dict(training, running_s=spent[name] - account.blocking_s)
                    for name, account in sorted(accounts.items())
                },
            }

    def print_summary(self, file: IO[str] | None = None) -> None:
        """Print the cost table or, if there are no costs to show, say which ledger is missing."""
        report = self.get_report()
        if report["budget_status"] == "unknown":
            words = (
                f"no ledger at {self._ledger}: no guard is running there. Set "
                "MINER_GUARD_STATE_DIR to your guard's state directory"
            )
        else:
            words = table.text(report)
        (file or sys.stdout).write(words + "\n")

    def write(self) -> None:
        """Write monitoring_costs.json now. Reports a write error once and never raises it."""
        if self._file is None:
            return
        try:
            state_dir.write_json(self._file, self.get_report())
        except OSError as error:
            finding = self._outage.failed(error, lost=0)
        else:
            finding = self._outage.succeeded()
        if finding is not None:
            self._report(finding)

    def _write_now_and_then(self) -> None:
        now = self._clock.monotonic()
        if self._file is not None and now - self._written >= _WRITE_EVERY_S:
            self._written = now
            self.write()


def _slow(words: str, operation: str, seconds: float, limit_s: float) -> Finding:
    return event(
        "monitoring_operation_slow",
        "warning",
        words,
        operation=operation,
        seconds=seconds,
        limit_s=limit_s,
    )


def _shown_to_guard(operation: str) -> contextlib.AbstractContextManager[Any]:
    """Inside a rank, show the guard the open operation, so that it does not take a long one for a
    hang. Do not import the hook here: a process without it has none."""
    hook = sys.modules.get("miner_guard.rank.guard")
    guard = None if hook is None else hook.current()
    return contextlib.nullcontext() if guard is None else guard.operation(operation)


def _write_at_exit(tracker: weakref.ref[MonitoringCostTracker]) -> None:
    if (own := tracker()) is not None and own._operations:
        own.write()
