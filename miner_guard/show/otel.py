"""Exports a run's events, spans and metrics over OTLP/HTTP, from a thread that reads run.db as any
reader does and leaves batching, retries, queues and its own variables to the SDK."""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import opentelemetry.sdk.metrics.export as sdk
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from miner_guard import __version__
from miner_guard.config import OtelSettings
from miner_guard.record.redaction import public, public_values
from miner_guard.record.status_document import StatusDocument, read_status
from miner_guard.record.store import RunReader, StoredEvent
from miner_guard.show import metrics
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import parse_iso_utc

NAMESPACE = "miner_guard."
_LOOK_EVERY_S, _LAST_WORDS_S = 1.0, 5.0
_SEVERITIES = {"debug": 5, "info": 9, "warning": 13, "error": 17, "critical": 21}
_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1", "celsius": "Cel", "watts": "W"}
_SPANS = {
    "miner_exited": ("launch", "runtime_s"),
    "miner_finished": ("launch", "runtime_s"),
    "miner_restarting": ("restart", "wait_s"),
    "hang_detected": ("hang", "idle_s"),
    "upload_succeeded": ("upload", "took_s"),
}
"""The events that have a length: the name of their span, and the field in seconds. A restart begins
with its event, everything else ends with it."""

Heard = Callable[[str, "str | None"], None]
"""Takes a signal, `logs`, `metrics` or `traces`, and why it fails; None once it works again."""


class Exporter(threading.Thread):
    """Follows the run's events from its first one, and shows the metrics of /metrics."""

    def __init__(self, state: StateDir, run_id: str, settings: OtelSettings, report: Heard) -> None:
        super().__init__(name="otlp", daemon=True)
        self._state, self._record, self._run_id = state, RunReader(state.db), run_id
        self._finishing = threading.Event()
        identity = {
            "service.name": "miner-guard",
            "service.version": __version__,
            "service.instance.id": run_id,
            "host.name": os.uname().nodename,
            "miner_guard.name": state.root.name,
        }
        self._resource = Resource.create(identity).merge(OTELResourceDetector().detect())
        every_ms = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")
        self._metrics_every_s = int(every_ms) / 1000 if every_ms.isdigit() else 60.0
        kinds = {"logs": OTLPLogExporter, "traces": OTLPSpanExporter, "metrics": OTLPMetricExporter}
        base = f"{str(settings.endpoint).rstrip('/')}/v1"
        exporters = {signal: kind(endpoint=f"{base}/{signal}") for signal, kind in kinds.items()}
        logging.getLogger("opentelemetry").propagate = False
        for signal, exporter in exporters.items():
            _Watched(exporter, signal, report)
        self._metrics = exporters["metrics"]
        self._logs = LoggerProvider(self._resource, shutdown_on_exit=False)
        self._logs.add_log_record_processor(BatchLogRecordProcessor(exporters["logs"]))
        self._spans = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        self._spans.add_span_processor(BatchSpanProcessor(exporters["traces"]))
        self._after: int | None = None

    def finish(self) -> None:
        """The guard has written its last event: send what is left, and end. Takes at most
        `_LAST_WORDS_S` and one timeout of the SDK."""
        self._finishing.set()
        self.join(_LAST_WORDS_S)

    def run(self) -> None:
        due = time.monotonic()
        while not self._finishing.wait(_LOOK_EVERY_S):
            self._pump()
            if time.monotonic() >= due:
                due = time.monotonic() + self._metrics_every_s
                self._export_metrics()
        self._pump()
        for provider in (self._logs, self._spans):
            provider.force_flush(round(1000 * _LAST_WORDS_S))
        self._export_metrics()

    def _pump(self) -> None:
        logger = self._logs.get_logger("miner_guard", __version__)
        tracer = self._spans.get_tracer("miner_guard", __version__)
        if self._after is None:
            self._after = self._record.before_run(self._run_id)
        for event in self._record.events(min_level="info", after=self._after):
            self._after = event.id
            record = _log_record(event)
            logger.emit(record)
            name, field = _SPANS.get(event.name, ("", ""))
            if (length_s := event.fields.get(field)) is not None:
                at, length = record.timestamp or 0, round(length_s * 1e9)
                begin = at if name == "restart" else at - length
                span = tracer.start_span(name, start_time=begin, attributes=record.attributes)
                span.end(begin + length)

    def _export_metrics(self) -> None:
        families = metrics_of(read_status(self._state) or StatusDocument())
        scope = InstrumentationScope("miner_guard", __version__)
        scoped = sdk.ScopeMetrics(scope, list(families), "")
        self._metrics.export(sdk.MetricsData([sdk.ResourceMetrics(self._resource, [scoped], "")]))


class _Watched(logging.Handler):
    """Reports once that an exporter fails, with what the SDK logs of it, and its next success."""

    def __init__(self, exporter: Any, signal: str, report: Heard) -> None:
        super().__init__(logging.WARNING)
        self._export, self._signal, self._report = exporter.export, signal, report
        self._failing = False
        exporter.export = self._export_and_report
        logging.getLogger("opentelemetry").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        named = next((each for each in ("metric", "trace") if each in record.name), "log")
        if named in self._signal and not self._failing:
            self._failing = True
            self._report(self._signal, record.getMessage()[:300])

    def _export_and_report(self, batch: Any, **options: Any) -> Any:
        result = self._export(batch, **options)
        # An enum whose first member means success.
        if self._failing and result.value == 0:
            self._failing = False
            self._report(self._signal, None)
        return result


def _log_record(event: StoredEvent) -> LogRecord:
    known = {**event.fields, "rank": event.rank}
    fields = {NAMESPACE + key: value for key, value in known.items() if value is not None}
    if event.name == "incident":
        fields["error.type"] = str(event.fields.get("label"))
    return LogRecord(
        timestamp=round(parse_iso_utc(event.ts) * 1e6) * 1000,
        severity_text=event.level.upper(),
        severity_number=SeverityNumber(_SEVERITIES.get(event.level, 0)),
        body=public(event.text),
        attributes=public_values(json.loads(json.dumps(fields, default=str))),
        event_name=NAMESPACE + event.name,
    )


def metrics_of(status: StatusDocument) -> Iterator[sdk.Metric]:
    """The families of /metrics with OpenTelemetry's names and types."""
    now, since = time.time_ns(), status.metrics.since
    times = (now if since is None else round(parse_iso_utc(since) * 1e9), now)
    cumulative = sdk.AggregationTemporality.CUMULATIVE
    for family in metrics.Families(status, __version__).collect():
        # OpenTelemetry keeps units out of names: `repo_age_seconds` is `repo_age` in seconds.
        stem, _, last = family.name.removeprefix(metrics.PREFIX).rpartition("_")
        name = NAMESPACE + (stem if last in _UNITS else f"{stem}_{last}".strip("_"))
        data: Any = None
        if family.type == "histogram":
            data = sdk.Histogram([_distribution(family.samples, *times)], cumulative)
        else:
            labelled = ((_attributes(each.labels), each.value) for each in family.samples)
            points = [sdk.NumberDataPoint(own, *times, value) for own, value in labelled]
            counts = family.type == "counter"
            data = sdk.Sum(points, cumulative, True) if counts else sdk.Gauge(points)
        yield sdk.Metric(name, family.documentation, _UNITS.get(last, "1"), data)


def _attributes(labels: dict[str, str]) -> dict[str, str]:
    return {NAMESPACE + key: text for key, text in labels.items() if text}


def _distribution(samples: Iterable[Any], start: int, now: int) -> sdk.HistogramDataPoint:
    """Prometheus counts what is at most a bound; OpenTelemetry, what is between two."""
    below = {s.labels["le"]: int(s.value) for s in samples if s.name.endswith("_bucket")}
    (total,) = (s.value for s in samples if s.name.endswith("_sum"))
    counts = [each - before for before, each in itertools.pairwise([0, *below.values()])]
    bounds = [float(bound) for bound in below][:-1]
    # Its extremes are unknown; the type does not allow for that, the wire does.
    extremes: Any = None
    return sdk.HistogramDataPoint(
        {}, start, now, sum(counts), total, counts, bounds, *2 * (extremes,)
    )
