"""Tracks what monitoring costs against a budget (source 000). No package outside the standard
library, because ranks use it too."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from miner_guard import state_dir
from miner_guard.config import CostSettings
from miner_guard.record.events import Event, WriteOutage, event
from miner_guard.system.clock import Clock, SystemClock, iso_utc

FILE = "monitoring_costs.json"
_MAX_OPERATIONS = 256
_WRITE_EVERY_S = 5.0
_EVIDENCE_S = 3.0
"""Monitoring has no impact until it has blocked training for this long (5 % of a minute): a
percentage of such a short time is meaningless."""

_LEVELS = ("ok", "warning", "critical")
_ELSEWHERE = -1
"""The place of another process's call among this process's threads."""

_IMPACTS = ((10.0, "critical"), (5.0, "high"), (2.5, "moderate"), (0.25, "acceptable"))
"""Lower bounds as percentages of training time, with their labels, from source 000's cost table."""


def budget_status(share_pct: float, budget: CostSettings) -> str:
    """Classify a share of training time: `ok`, `warning` or `critical`."""
    return _LEVELS[(share_pct > budget.budget_pct) + (share_pct > budget.critical_pct)]


def _percent(seconds: float, training_s: float) -> float:
    """`seconds` as a percentage of training time, at most 100 even if monitoring took longer than
    training."""
    if seconds <= 0:
        return 0.0
    return 100.0 if seconds >= training_s else 100 * seconds / training_s


@dataclass
class Operation:
    """The accumulated cost of one operation."""

    calls: int = 0
    blocking_s: float = 0.0
    """Seconds that the operation blocked training."""

    background_s: float = 0.0
    """CPU seconds spent alongside training."""

    last_s: float = 0.0
    last_done: float | None = None
    """Monotonic time of the last call."""

    last_step: int | None = None
    delayed: bool = False
    """Whether the call that is due waits for the budget."""

    throttled: bool = False
    """Whether the latest call had to wait."""

    def row(self, training_s: float, running_s: float) -> dict[str, Any]:
        """The operation's row in monitoring_costs.json. `total_time` is blocking time only,
        `running_s` of an unfinished call included; background time is separate."""
        blocking_s = self.blocking_s + running_s
        total_s = self.blocking_s + self.background_s
        share = _percent(blocking_s, training_s)
        impact = next((word for limit, word in _IMPACTS if share >= limit), "negligible")
        return {
            "total_time": round(blocking_s, 6),
            "background_time": round(self.background_s, 6),
            "calls": self.calls,
            "average_time": round(total_s / self.calls, 6) if self.calls else None,
            "percentage": round(share, 4),
            "impact": impact if blocking_s >= _EVIDENCE_S else "negligible",
            "status": "throttled" if self.throttled else "active",
        }


def say_on_stderr(event: Event) -> None:
    """Print a warning on stderr: the default `report` of a tracker outside a guard."""
    sys.stderr.write(f"{event.level.upper()} | {event.text}\n")


class MonitoringCostTracker:
    """Tracks what monitoring costs, warns, and lets expensive operations wait over budget.
    Thread-safe.

    Shares are percentages of training time: the time since `start`, minus the time that monitoring
    blocked training.
    """

    def __init__(
        self,
        output_dir: str | Path | None = None,
        *,
        budget: CostSettings | None = None,
        clock: Clock | None = None,
        report: Callable[[Event], None] = say_on_stderr,
        on_record: Callable[[str, float, bool], None] | None = None,
        ledger: Path | None = None,
    ) -> None:
        """`output_dir`: where to write monitoring_costs.json; None: nowhere. `report` receives the
        warnings; `on_record(operation, seconds, blocking)` is called for each recorded call.
        `ledger`: another process's monitoring_costs.json, which `get_report` returns until this
        tracker records an operation."""
        self.budget = budget or CostSettings()
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
            if self._running.get(_ELSEWHERE) != (operation, since):
                self._warned_open = False
            self._running[_ELSEWHERE] = (operation, since)
            seconds, limit = self._clock.monotonic() - since, self.budget.operation_warn_s
            events = self._judged()
            if seconds > limit and not self._warned_open:
                self._warned_open = True
                events.append(
                    _slow(f"in {operation} for {seconds:.0f}s", operation, seconds, limit)
                )
        for each in events:
            self._report(each)

    def record(
        self, operation: str, seconds: float, *, blocking: bool = True, calls: int = 1
    ) -> None:
        """Add `calls` calls that were timed elsewhere and took `seconds` in total."""
        with self._mutex:
            account, now = self._account(operation), self._clock.monotonic()
            calls, spent = max(1, calls), max(0.0, seconds)
            account.calls += calls
            account.last_s, account.last_done = spent / calls, now
            if blocking:
                account.blocking_s += spent
            else:
                account.background_s += spent
            events, limit = self._judged(), self.budget.operation_warn_s
            if blocking and account.last_s > limit:
                words = f"{operation} took {account.last_s:.1f}s"
                events.insert(0, _slow(words, operation, account.last_s, limit))
        for each in events:
            self._report(each)
        if self._on_record is not None:
            self._on_record(operation, seconds, blocking)
        if self._file is not None and now - self._written >= _WRITE_EVERY_S:
            self._written = now
            self.write()

    def _account(self, operation: str) -> Operation:
        if operation not in self._operations and len(self._operations) >= _MAX_OPERATIONS:
            operation = "other"
        return self._operations.setdefault(operation, Operation())

    def _judged(self) -> list[Event]:
        """Update the budget's status; return an event if it has become worse."""
        share = self.share_pct()
        before, self._level = self._level, self._status(share)
        if _LEVELS.index(self._level) <= _LEVELS.index(before):
            return []
        critical = self._level == "critical"
        limit = self.budget.critical_pct if critical else self.budget.budget_pct
        spent = self._blocking_by_operation()
        return [
            event(
                "monitoring_over_budget",
                "critical" if critical else "warning",
                f"MONITORING OVER BUDGET: {share:.1f}% (limit {limit:.0f}%)",
                share_pct=share,
                limit_pct=limit,
                most_expensive=max(spent, key=spent.__getitem__),
            )
        ]

    def _status(self, share_pct: float) -> str:
        return budget_status(share_pct, self.budget) if self.blocking_s() >= _EVIDENCE_S else "ok"

    def _blocking_by_operation(self) -> dict[str, float]:
        """Seconds that each operation has blocked training, unfinished calls included."""
        now = self._clock.monotonic()
        spent = {name: account.blocking_s for name, account in self._operations.items()}
        for operation, since in list(self._running.values()):
            spent[operation] = spent.get(operation, 0.0) + max(0.0, now - since)
        return spent

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
            return _percent(self.blocking_s(), self.training_s())

    def is_over_budget(self) -> bool:
        """Return True if monitoring takes more training time than the budget allows, and at least
        3 s: a share of less says nothing."""
        return self._status(self.share_pct()) != "ok"

    def due(
        self,
        operation: str,
        *,
        every_s: float | None = None,
        every_steps: int | None = None,
        step: int | None = None,
    ) -> bool:
        """Return True if `operation` is due. Call it on every step, or at any other rate.

        Pass either `every_s`, or `every_steps` and the current `step`. The most expensive operation
        waits while its next call would take monitoring over budget. The answer depends on this
        process's clock: for an operation with a collective, ask on one rank and broadcast. Raises
        ValueError without an interval.
        """
        with self._mutex:
            account, change = self._account(operation), None
            if every_steps is not None and step is not None:
                last = account.last_step
                # Inner steps restart at 0 with each outer step.
                if last is None or step < last:
                    ready = account.delayed or step % every_steps == 0
                else:
                    ready = step - last >= every_steps
            elif every_s is not None:
                done = account.last_done
                ready = done is None or self._clock.monotonic() - done >= every_s
            else:
                raise ValueError("due needs every_s, or every_steps and step")
            if ready:
                ready, change = self._affordable(operation, account)
            if ready and step is not None:
                account.last_step = step
        if change is not None:
            self._report(change)
        return ready

    def _affordable(self, operation: str, account: Operation) -> tuple[bool, Event | None]:
        """Whether the call that is due fits the budget, and an event if that has changed."""
        spent, limit = self.blocking_s() + account.last_s, self.budget.budget_pct
        share = _percent(spent, self.training_s())
        dearer = any(a.blocking_s > account.blocking_s for a in self._operations.values())
        waits = account.blocking_s > 0 and share > limit and not dearer
        # The call that had to wait runs first: the next one on time is as often as asked.
        changes = waits != account.throttled and (waits or not account.delayed)
        account.delayed = waits
        if not changes:
            return not waits, None
        account.throttled = waits
        words = f"RELAXED: {operation} runs as often as asked again"
        if waits:
            words = (
                f"THROTTLED: {operation} waits, because its next call would take monitoring to "
                f"{share:.1f}% (limit {limit:.0f}%)"
            )
        return not waits, event(
            "monitoring_over_budget",
            "warning" if waits else "info",
            f"MONITORING {words}",
            operation=operation,
            share_pct=share,
            limit_pct=limit,
            throttled=waits,
        )

    def get_report(self) -> dict[str, Any]:
        """The costs so far, in the format of monitoring_costs.json. `budget_status` is `unknown` if
        nothing was recorded here and the ledger can't be read."""
        with self._mutex:
            if not self._operations and self._ledger is not None:
                stored = state_dir.read_json(self._ledger)
                if isinstance(stored, dict) and isinstance(stored.get("operations"), dict):
                    return stored
            measured = bool(self._operations or self._running) or self._ledger is None
            spent = self._blocking_by_operation()
            accounts = {name: self._operations.get(name) or Operation() for name in sorted(spent)}
            training = self.training_s()
            share = _percent(self.blocking_s(), training)
            return {
                "budget_status": self._status(share) if measured else "unknown",
                "total_percentage": round(share, 4),
                "budget_percentage": self.budget.budget_pct,
                "critical_percentage": self.budget.critical_pct,
                "total_time": round(self.blocking_s(), 6),
                "background_time": round(self.background_s(), 6),
                "training_time": round(training, 3),
                "step_time": self._measured_step_s(),
                "updated": iso_utc(self._clock.wall()),
                "operations": {
                    name: account.row(training, spent[name] - account.blocking_s)
                    for name, account in accounts.items()
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
            words = cost_table(report)
        (file or sys.stdout).write(words + "\n")

    def write(self) -> None:
        """Write monitoring_costs.json now. Reports a write error once and never raises it."""
        if self._file is None:
            return
        try:
            state_dir.write_json(self._file, self.get_report())
        except OSError as error:
            event = self._outage.failed(error)
        else:
            event = self._outage.succeeded()
        if event is not None:
            self._report(event)


def _slow(words: str, operation: str, seconds: float, limit_s: float) -> Event:
    return event(
        "monitoring_over_budget",
        "warning",
        f"MONITORING SLOW: {words} (limit {limit_s:.0f}s)",
        operation=operation,
        seconds=seconds,
        limit_s=limit_s,
    )


# reporting

_TITLES = (
    *("Operation", "Calls", "Time/Call", "Frequency", "Per 1000 steps"),
    *("Total", "Background", "Share", "Impact", "Status"),
)
_WORDS = {"ok": "within budget", "warning": "OVER BUDGET", "critical": "FAR OVER BUDGET"}


def cost_table(report: Mapping[str, Any]) -> str:
    """Render the report: the verdict, then one row per operation, most expensive first."""
    ordered = sorted(
        report["operations"].items(),
        key=lambda row: (-row[1]["total_time"], -row[1]["background_time"], row[0]),
    )
    rows = [_TITLES, *(_cells(name, values, report) for name, values in ordered)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    head = (
        f"Monitoring overhead: {report['total_percentage']:.2f}% of "
        f"{report['training_time']:.0f}s training"
        f" (budget {report['budget_percentage']:g}%): {_WORDS[report['budget_status']]}"
    )
    return "\n".join([head, *(line.rstrip() for line in lines)])


def _cells(name: str, values: Mapping[str, Any], report: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of one row. Frequency and cost per 1000 steps need the step time."""
    calls, total, average = values["calls"], values["total_time"], values["average_time"]
    training, step = report["training_time"], report.get("step_time")
    every = "once" if calls == 1 else "-"
    if calls > 1 and training > 0:
        steps = training / calls / step if step else 0.0
        every = f"every {steps:.0f} steps" if step else f"every {short_seconds(training / calls)}"
    return (
        name,
        str(calls),
        "-" if average is None else short_seconds(average),
        every,
        short_seconds(1000 * total * step / training) if step and training > 0 else "-",
        short_seconds(total),
        short_seconds(values["background_time"]),
        f"{values['percentage']:.2f}%",
        values["impact"],
        values["status"],
    )


def short_seconds(value: float) -> str:
    """Format a duration in ms (three significant digits) or in seconds."""
    if value == 0:
        return "0s"
    return f"{value * 1000:.3g}ms" if value < 1 else f"{value:.1f}s"


# the tracker of this process


def _rank_guard() -> Any | None:
    """This rank's hook. Never imports it: reading costs must not create one in a process without
    it."""
    hook = sys.modules.get("miner_guard.rank.guard")
    return None if hook is None else hook.current()


def _shown_to_guard(operation: str) -> contextlib.AbstractContextManager[Any]:
    """Inside a rank, show the guard the open operation, so that it does not take a long one for a
    hang."""
    guard = _rank_guard()
    return contextlib.nullcontext() if guard is None else guard.operation(operation)


def _write_at_exit(tracker: weakref.ref[MonitoringCostTracker]) -> None:
    if (living := tracker()) is not None and living._operations:
        living.write()


_global: MonitoringCostTracker | None = None
_global_mutex = threading.Lock()


def set_global_tracker(tracker: MonitoringCostTracker | None) -> None:
    """Make `tracker` this process's global tracker; None removes it."""
    global _global
    with _global_mutex:
        _global = tracker


def get_global_tracker(env: Mapping[str, str] | None = None) -> MonitoringCostTracker:
    """Return this process's tracker. Inside a rank, it records to the guard's ledger. Until this
    process records an operation, the tracker's report shows that ledger."""
    global _global
    with _global_mutex:
        if _global is None:
            environment = os.environ if env is None else env
            ledger = _ledger_of(environment)
            _global = _of_this_rank(ledger) or MonitoringCostTracker(ledger=ledger)
        return _global


def _ledger_of(env: Mapping[str, str]) -> Path | None:
    try:
        return state_dir.choose("miner", env.get(state_dir.STATE_DIR), env).costs
    except RuntimeError:
        # With neither a state directory nor a home directory, costs stay local to this process.
        return None


def _of_this_rank(ledger: Path | None) -> MonitoringCostTracker | None:
    guard = _rank_guard()
    if guard is None:
        return None

    def report(event: Event) -> None:
        # The supervisor judges the budget from the recorded costs: reporting it here too would
        # duplicate the event.
        if "throttled" in event.fields:
            guard.emit(event)

    def on_record(operation: str, seconds: float, blocking: bool) -> None:
        guard.add_cost(operation, seconds, blocking=blocking)

    budget = guard.place.settings.costs
    return MonitoringCostTracker(budget=budget, ledger=ledger, report=report, on_record=on_record)
