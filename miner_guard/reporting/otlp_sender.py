"""Exports events and metrics over OTLP/HTTP: `python -m miner_guard.reporting.otlp_sender`, a
separate process alongside the supervisor.

It reads run.db like any other reader, so a receiver that is slow, down or hostile does not affect
the guard, and events wait on disk, not in memory. It exports its own run's events; those that an
earlier guard could not export are not sent again.

It receives its settings as one line of JSON on stdin. On stdout it writes one line of JSON per
change: `{"sent": N, "metrics": N}`, `{"failing": SIGNAL, "reason": …}`, `{"recovered": SIGNAL,
"seconds": …}`, `{"refused": N, "reason": …}`. At EOF on stdin it exports everything that is left,
then exits.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExportResult
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from miner_guard import __version__, state_dir
from miner_guard.eventlog.status_document import StatusDocument, read_status, status_age_s
from miner_guard.record.store import RunReader, StoredEvent
from miner_guard.reporting import otlp_names
from miner_guard.reporting.otlp_answers import WRONG_REQUEST, Channel, LastWords, LatestAnswer
from miner_guard.reporting.otlp_names import MetricPoint
from miner_guard.system.clock import parse_iso_utc
from miner_guard.system.readiness import ready

LOGS, METRICS = "logs", "metrics"
_LOGS_OK = LogRecordExportResult.SUCCESS

_LOOK_EVERY_S = 1.0
"""Maximum time that an event waits for its batch (the SDK's default)."""

_BATCH = 512
"""Events per request."""

_TIMEOUT_S = 10.0
"""Limit for one request including its retries, the SDK's default; `OTEL_EXPORTER_OTLP_TIMEOUT`
overrides it."""

_LAST_WORDS_S = 5.0
"""Time allowed for exporting the last lines and metrics after the guard's process has exited."""


@dataclass(frozen=True)
class SenderSettings:
    """The sender's settings."""

    state: str
    run_id: str
    endpoint: str
    min_level: str
    metrics_every_s: float
    guard_pid: int


class EventExporter:
    """Exports the run's events, from its first one."""

    def __init__(
        self, order: SenderSettings, resource: Resource, report: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._order, self._resource, self._report = order, resource, report
        self._state = state_dir.StateDir(Path(order.state))
        self._resources: dict[str, Resource] = {}
        self._scope = InstrumentationScope("miner_guard", __version__)
        self._answer = LatestAnswer()
        self._exporter = OTLPLogExporter(
            endpoint=f"{order.endpoint.rstrip('/')}/v1/logs",
            timeout=_timeout_s(),
            session=self._answer.session,
        )
        self.channel = Channel(LOGS, report)
        self._record_of_run = RunReader(self._state.db)
        self._after = self._record_of_run.before_run(order.run_id)
        self._waiting: list[StoredEvent] = []
        self.sent = 0
        self.saw_the_end = False
        """True if the receiver has accepted the guard's last event."""

    def pump(self, words: LastWords, now: float) -> bool:
        """Export up to one batch. Return True if there may be more."""
        if not self.channel.ready(now):
            return False
        if not self._waiting:
            self._waiting = self._record_of_run.events(
                min_level=self._order.min_level, after=self._after, limit=_BATCH
            )
            if not self._waiting:
                return False
        count = len(self._waiting)
        self._answer.forget()
        records = [self._record(hit) for hit in self._waiting]
        if words.of_failure(lambda: self._exporter.export(records)) is _LOGS_OK:
            self.channel.succeeded(time.monotonic())
            self.sent += count
        elif self._answer.status in WRONG_REQUEST:
            self._report({"refused": count, "reason": words.text})
        else:
            self.channel.failed(time.monotonic(), words.text)
            return False
        self.saw_the_end = any(
            hit.name == "guard_stopped" and hit.run_id == self._order.run_id
            for hit in self._waiting
        )
        self._after, self._waiting = self._waiting[-1].id, []
        return True

    def _record(self, hit: StoredEvent) -> ReadableLogRecord:
        record = hit.record()
        return ReadableLogRecord(
            LogRecord(
                timestamp=round(parse_iso_utc(hit.ts) * 1e6) * 1000,
                observed_timestamp=time.time_ns(),
                severity_text=hit.level.upper(),
                severity_number=SeverityNumber(otlp_names.SEVERITIES.get(hit.level, 0)),
                body=hit.text,
                attributes=otlp_names.attributes(record),
                event_name=otlp_names.NAMESPACE + hit.name,
            ),
            self._resource_of(str(record.get("run_id"))),
            self._scope,
        )

    def _resource_of(self, run_id: str) -> Resource:
        """A run's resource: events that an earlier guard could not export keep their own run's
        id."""
        if run_id not in self._resources:
            self._resources = {run_id: self._resource.merge(_instance(run_id))}
        return self._resources[run_id]


class MetricExporter:
    """Exports the present state as metrics."""

    def __init__(
        self, order: SenderSettings, resource: Resource, report: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._state = state_dir.StateDir(Path(order.state))
        self._every_s = order.metrics_every_s
        self._exporter = OTLPMetricExporter(
            endpoint=f"{order.endpoint.rstrip('/')}/v1/metrics", timeout=_timeout_s()
        )
        self._reader = InMemoryMetricReader()
        own = Resource({"process.pid": order.guard_pid}).merge(_instance(order.run_id))
        provider = MeterProvider([self._reader], resource.merge(own), shutdown_on_exit=False)
        self._meter = provider.get_meter("miner_guard", __version__)
        self._points: dict[str, list[MetricPoint]] = {}
        self._known: set[str] = set()
        self._due = 0.0
        self.channel = Channel(METRICS, report)
        self.sent = 0

    def pump(self, words: LastWords, now: float, *, last: bool = False) -> None:
        """Export the metrics if they are due. With `last`, export them whether they are due or
        not."""
        if not (last or (now >= self._due and self.channel.ready(now))):
            return
        status = read_status(self._state)
        if status is None:
            return
        self._due = now + self._every_s
        self._observe(status)
        data = self._reader.get_metrics_data()
        if data is None:
            return
        if words.of_failure(lambda: self._exporter.export(data)) is MetricExportResult.SUCCESS:
            self.sent += 1
            self.channel.succeeded(time.monotonic())
        else:
            self.channel.failed(time.monotonic(), words.text)
            self._due = now

    def _observe(self, status: StatusDocument) -> None:
        age_s = status_age_s(self._state)
        self._points = {}
        for point in otlp_names.points(status, version=__version__, age_s=age_s):
            self._points.setdefault(point.name, []).append(point)
            if point.name not in self._known:
                self._known.add(point.name)
                self._add_instrument(point)

    def _add_instrument(self, point: MetricPoint) -> None:
        def observe(_options: CallbackOptions) -> Iterable[Observation]:
            return [
                Observation(each.value, dict(each.attributes))
                for each in self._points.get(point.name, ())
            ]

        create = (
            self._meter.create_observable_counter
            if point.counter
            else self._meter.create_observable_gauge
        )
        create(point.name, [observe], point.unit, point.description)


def _timeout_s() -> float | None:
    """The request timeout; None if an environment variable sets it, since the SDK reads that
    variable itself."""
    names = [name for name in os.environ if name.startswith("OTEL_EXPORTER_OTLP")]
    return None if any(name.endswith("TIMEOUT") for name in names) else _TIMEOUT_S


def _instance(run_id: str) -> Resource:
    return Resource({"service.instance.id": run_id})


def _resource(state: state_dir.StateDir) -> Resource:
    """The resource that identifies this guard; `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES`
    override it."""
    own = {
        "service.name": "miner-guard",
        "service.version": __version__,
        "host.name": os.uname().nodename,
        "miner_guard.name": state.root.name,
    }
    return Resource.create(own).merge(OTELResourceDetector().detect())


class Sender:
    """The sender process's main loop."""

    def __init__(self, order: SenderSettings, report: Callable[[Mapping[str, Any]], None]) -> None:
        self._order, self._report = order, report
        self._words = LastWords()
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self._words)
        logger.propagate = False
        resource = _resource(state_dir.StateDir(Path(order.state)))
        self.events = EventExporter(order, resource, report)
        self.metrics = MetricExporter(order, resource, report)
        self._reported = (0, 0)

    def turn(self) -> bool:
        """Export what is due. Return True if more events are waiting."""
        now = time.monotonic()
        more = self.events.pump(self._words, now)
        self.metrics.pump(self._words, now)
        counts = (self.events.sent, self.metrics.sent)
        if counts != self._reported:
            self._reported = counts
            self._report({"sent": counts[0], "metrics": counts[1]})
        return more

    def finish(self) -> None:
        """Export the remaining events while the guard is shutting down, up to and including its
        last line."""
        threading.Thread(target=_exit_after, args=(self._order.guard_pid,), daemon=True).start()
        while not self.events.saw_the_end:
            if not self.turn():
                time.sleep(0.05)
        self.metrics.pump(self._words, time.monotonic(), last=True)


def _exit_after(guard_pid: int) -> None:
    """Exit soon after the guard's process, whatever the receiver does."""
    while os.getppid() == guard_pid:
        time.sleep(0.1)
    time.sleep(_LAST_WORDS_S)
    os._exit(0)


def _report(document: Mapping[str, Any]) -> None:
    try:
        sys.stdout.write(json.dumps(document) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The guard has exited, but its last line is not exported yet.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _ended(files: Sequence[Any], within_s: float) -> bool:
    readable, _ = ready(files, within_s)
    return bool(readable)


def main() -> None:
    """Entry point of the child process."""
    sender = Sender(SenderSettings(**json.loads(sys.stdin.readline())), _report)
    os.nice(10)
    while not _ended([sys.stdin], 0.0 if sender.turn() else _LOOK_EVERY_S):
        pass
    sender.finish()


if __name__ == "__main__":
    main()
