"""Calls the monitors one after another and isolates failures: one that raises stops neither the
others nor the supervisor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from miner_guard.rank.journal import parse
from miner_guard.rank.layout import Now, StepRecord
from miner_guard.record.events import Event, degraded
from miner_guard.record.words import defect
from miner_guard.watch.base import Exit, Launch, Monitor
from miner_guard.watch.line_router import Delivery, LineRouter

_MAX_DEPTH = 4
"""Maximum length of a chain of events that trigger one another."""


class MonitorRunner:
    """All of the running supervisor's monitors. For use on the supervisor's thread only."""

    def __init__(self, log: Callable[[Event], None]) -> None:
        self._log = log
        self.monitors: list[Monitor] = []
        self.on_event: Callable[[Event], None] = lambda _event: None
        """Called for every event; drives the restart policy."""

        self.deliveries = 0
        """Number of steps, entries, launches, exits, events and pieces of output delivered. While
        it stays the same, the monitors have learned nothing new."""

        self._output: LineRouter | None = None
        self._failed: set[tuple[str, str]] = set()

    def launch(self, launch: Launch) -> None:
        self.deliveries += 1
        self._each("on_launch", launch)
        self._output = LineRouter(self.monitors)

    def steps(self, rank: int, steps: Sequence[StepRecord]) -> None:
        self.deliveries += 1
        self._each("on_steps", rank, steps)

    def entry(self, rank: int, entry: Mapping[str, Any]) -> None:
        """Deliver a journal entry to the monitors; skip kinds that this version does not know."""
        self.deliveries += 1
        parsed = parse(entry)
        if parsed is not None:
            self._each("on_entry", rank, parsed)

    def output(self, chunk: bytes) -> None:
        """Deliver the miner's output to the monitors; the unfinished end of a long chunk waits for
        the next tick."""
        self.deliveries += 1
        if self._output is None:
            self._output = LineRouter(self.monitors)
        self._show(self._output.pieces(chunk))

    def _show(self, deliveries: Iterable[Delivery]) -> None:
        for monitor, method, argument in deliveries:
            for event in self._call(monitor, method, argument):
                self.log(event, monitor)

    def tick(self, now: float, ranks: Mapping[int, Now]) -> None:
        self._each("on_tick", now, ranks)

    def end_output(self) -> None:
        """The output is complete: deliver the rest of its last line."""
        if self._output is not None:
            self._show(self._output.end())

    def objections(self) -> list[str]:
        """Every monitor's objection to counting an exit with code 0 as finished; a monitor that
        fails objects too."""
        reasons: list[str] = []
        for monitor in self.monitors:
            try:
                why = monitor.objection()
            except Exception as error:  # noqa: BLE001 - a bug in a monitor must not end supervision; it is reported
                self._report_defect(monitor.name, "objection", error)
                why = f"{monitor.name} failed to check the exit"
            reasons += [why] if why is not None else []
        return reasons

    def exit(self, end: Exit) -> None:
        self.deliveries += 1
        self.end_output()
        self._each("on_exit", end)

    def stop(self) -> None:
        self._each("on_stop")

    def lingers(self) -> bool:
        """Return True while any monitor has something to send."""
        return any(monitor.lingers() for monitor in self.monitors)

    def finish(self) -> None:
        for monitor in self.monitors:
            monitor.finish()

    def log(self, event: Event, source: Monitor | None = None, depth: int = 0) -> None:
        """Log an event and deliver it to every monitor except its source. Never raises."""
        self.deliveries += 1
        try:
            self._log(event)
            self.on_event(event)
        except Exception as error:  # noqa: BLE001 - one bad event must not stop supervision; it is reported
            self._report_defect(event.name, "log", error)
        if depth >= _MAX_DEPTH:
            return
        for monitor in self.monitors:
            if monitor is not source:
                for further in self._call(monitor, "on_event", event):
                    self.log(further, monitor, depth + 1)

    def snapshots(self) -> dict[str, Any]:
        """Each monitor's snapshot, keyed by the monitor's name."""
        documents: dict[str, Any] = {}
        for monitor in self.monitors:
            try:
                documents[monitor.name] = dict(monitor.snapshot())
            except Exception as error:  # noqa: BLE001 - a bug in a monitor must not end supervision; it is reported once
                self._report_defect(monitor.name, "snapshot", error)
                documents[monitor.name] = None
        return documents

    def _each(self, method: str, *arguments: Any) -> None:
        for monitor in self.monitors:
            for event in self._call(monitor, method, *arguments):
                self.log(event, monitor)

    def _call(self, monitor: Monitor, method: str, *arguments: Any) -> Iterable[Event]:
        try:
            return list(getattr(monitor, method)(*arguments))
        except Exception as error:  # noqa: BLE001 - a bug in a monitor must not end supervision; it is reported once
            self._report_defect(monitor.name, method, error)
            return ()

    def _report_defect(self, who: str, method: str, error: Exception) -> None:
        if (who, method) in self._failed:
            return
        self._failed.add((who, method))
        what = f"{who}.{method} failed with {defect(error)}; "
        self._log(degraded(what + "further occurrences are suppressed"))
