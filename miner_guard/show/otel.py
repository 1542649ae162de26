"""Exports a run's events and metrics over OTLP/HTTP: `python -m miner_guard.show.otel`, a
process beside the guard, so that a slow or hostile receiver costs the guard nothing.

It reads run.db as any reader does and leaves batching, retries and queues to the SDK. The SDK's own
variables set headers, certificates, timeout and compression (`OTEL_EXPORTER_OTLP_HEADERS` and so
on). stdin: one line of JSON, then EOF when the guard stops; stdout: a line of JSON when a signal
begins to fail or works again.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from miner_guard import __version__
from miner_guard.record.public import public, public_values
from miner_guard.record.status_document import StatusDocument, read_status
from miner_guard.record.store import RunReader, StoredEvent
from miner_guard.show import metrics
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import parse_iso_utc
from miner_guard.system.readiness import ready

NAMESPACE = "miner_guard."
_LOOK_EVERY_S = 1.0
_LAST_WORDS_MS = 5000
_SEVERITIES = {"debug": 5, "info": 9, "warning": 13, "error": 17, "critical": 21}
_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1", "celsius": "Cel", "watts": "W"}


class ExportLog(logging.Handler):
    """Turns what the SDK logs of its exporters into one line per signal that begins to fail."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._failing: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        signal = "metrics" if "metric" in record.name else "logs"
        if signal not in self._failing:
            self._failing[signal] = record.getMessage()[:300]
            _report({"failing": signal, "reason": self._failing[signal]})

    def exported(self, signal: str, result: Any) -> Any:
        """Note the result of an export, an enum whose first member means success."""
        if result.value == 0 and self._failing.pop(signal, None) is not None:
            _report({"recovered": signal})
        return result


def _watched(exporter: Any, signal: str, log: ExportLog) -> Any:
    export = exporter.export
    exporter.export = lambda *args, **options: log.exported(signal, export(*args, **options))
    return exporter


class Events:
    """Follows the run's events from its first one."""

    def __init__(self, order: dict[str, Any], provider: LoggerProvider) -> None:
        self._reader = RunReader(StateDir(Path(order["state"])).db)
        self._logger = provider.get_logger("miner_guard", __version__)
        self._after = self._reader.before_run(order["run_id"])

    def pump(self) -> None:
        for event in self._reader.events(min_level="info", after=self._after):
            self._after = event.id
            self._logger.emit(_log_record(event))


def _log_record(event: StoredEvent) -> LogRecord:
    fields = {k: v for k, v in event.fields.items() if v is not None}
    attributes = {NAMESPACE + key: value for key, value in fields.items()}
    if event.rank is not None:
        attributes[f"{NAMESPACE}rank"] = event.rank
    if event.name == "incident" and isinstance(fields.get("label"), str):
        attributes["error.type"] = fields["label"]
    return LogRecord(
        timestamp=round(parse_iso_utc(event.ts) * 1e6) * 1000,
        severity_text=event.level.upper(),
        severity_number=SeverityNumber(_SEVERITIES.get(event.level, 0)),
        body=public(event.text),
        attributes=public_values(json.loads(json.dumps(attributes, default=str))),
        event_name=NAMESPACE + event.name,
    )


class Metrics:
    """Observable instruments over the metrics of /metrics; a family gets its own when it first
    appears."""

    def __init__(self, order: dict[str, Any], provider: MeterProvider) -> None:
        self._state = StateDir(Path(order["state"]))
        self._meter = provider.get_meter("miner_guard", __version__)
        self._names: set[str] = set()
        self._families: dict[str, Any] = {}

    def refresh(self) -> None:
        status = read_status(self._state) or StatusDocument()
        families = metrics.families(status, version=__version__)
        self._families = {f.name: f for f in families if f.type in ("gauge", "counter")}
        for name in self._families.keys() - self._names:
            self._names.add(name)
            self._add(name)

    def _add(self, name: str) -> None:
        # OpenTelemetry keeps units out of names: `step_p50_seconds` is `step_p50` in seconds.
        stem, _, last = name.removeprefix(metrics.PREFIX).rpartition("_")
        shown = stem if last in _UNITS else f"{stem}_{last}".strip("_")
        family = self._families[name]
        counter = family.type == "counter"
        meter = self._meter
        create = meter.create_observable_counter if counter else meter.create_observable_gauge
        callback = functools.partial(self._observe, name)
        create(NAMESPACE + shown, [callback], _UNITS.get(last, "1"), family.documentation)

    def _observe(self, name: str, _options: CallbackOptions) -> Iterable[Observation]:
        family = self._families.get(name)
        for sample in family.samples if family is not None else ():
            labels = {NAMESPACE + key: text for key, text in sample.labels.items() if text}
            yield Observation(sample.value, labels)


def main() -> None:
    """Export until EOF on stdin, then the last events and metrics."""
    order = json.loads(sys.stdin.readline())
    log = ExportLog()
    logger = logging.getLogger("opentelemetry")
    logger.addHandler(log)
    logger.propagate = False
    identity = {
        "service.name": "miner-guard",
        "service.version": __version__,
        "service.instance.id": order["run_id"],
        "host.name": os.uname().nodename,
        "miner_guard.name": Path(order["state"]).name,
    }
    resource = Resource.create(identity).merge(OTELResourceDetector().detect())
    base = order["endpoint"].rstrip("/")
    logs_out = _watched(OTLPLogExporter(endpoint=f"{base}/v1/logs"), "logs", log)
    metrics_out = _watched(OTLPMetricExporter(endpoint=f"{base}/v1/metrics"), "metrics", log)
    log_provider = LoggerProvider(resource, shutdown_on_exit=False)
    log_provider.add_log_record_processor(BatchLogRecordProcessor(logs_out))
    reader = PeriodicExportingMetricReader(metrics_out)
    meter_provider = MeterProvider([reader], resource, shutdown_on_exit=False)
    events, figures = Events(order, log_provider), Metrics(order, meter_provider)
    stopping = False
    while not stopping:
        stopping = bool(ready([0], _LOOK_EVERY_S)[0])
        events.pump()
        figures.refresh()
    # The guard writes its last events while it stops, and waits for nobody: so does this process.
    threading.Timer(3 * _LAST_WORDS_MS / 1000, os._exit, (0,)).start()
    while os.getppid() == order["guard_pid"]:
        events.pump()
        ready([], 0.1)
    events.pump()
    figures.refresh()
    log_provider.force_flush(_LAST_WORDS_MS)
    meter_provider.force_flush(_LAST_WORDS_MS)
    os._exit(0)


def _report(document: dict[str, Any]) -> None:
    try:
        sys.stdout.write(json.dumps(document) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The guard has ended, and its last events are still to be sent.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


if __name__ == "__main__":
    main()
