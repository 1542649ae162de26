"""Exports a run's events, spans and metrics over OTLP/HTTP, from a thread that reads run.db as any
reader does and leaves batching, retries and queues to the SDK.

The SDK's own variables set headers, certificates, timeout and compression
(`OTEL_EXPORTER_OTLP_HEADERS` and so on).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
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
_LOOK_EVERY_S = 1.0
_LAST_WORDS_S = 5.0
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


class ExportLog(logging.Handler):
    """Turns what the SDK logs of its exporters into one report per signal that begins to fail."""

    def __init__(self, report: Heard) -> None:
        super().__init__(logging.WARNING)
        self._report = report
        self._failing: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        named = (signal for signal in ("metrics", "traces") if signal[:-1] in record.name)
        signal = next(named, "logs")
        if signal not in self._failing:
            self._failing.add(signal)
            self._report(signal, record.getMessage()[:300])

    def watched(self, exporter: Any, signal: str) -> Any:
        """The exporter, whose next success ends a failure."""
        export = exporter.export

        def exported(*arguments: Any, **options: Any) -> Any:
            result = export(*arguments, **options)
            # An enum whose first member means success.
            if result.value == 0 and signal in self._failing:
                self._failing.discard(signal)
                self._report(signal, None)
            return result

        exporter.export = exported
        return exporter


class Exporter(threading.Thread):
    """Follows the run's events from its first one, and shows the metrics of /metrics.

    Once the guard stops, it sends all that is left, which takes at most `_LAST_WORDS_S` and one
    timeout of the SDK."""

    def __init__(self, state: StateDir, run_id: str, settings: OtelSettings, report: Heard) -> None:
        super().__init__(name="otlp", daemon=True)
        self._state = state
        self._record = RunReader(state.db)
        self._finishing = threading.Event()
        log = ExportLog(report)
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(log)
        logger.propagate = False
        identity = {
            "service.name": "miner-guard",
            "service.version": __version__,
            "service.instance.id": run_id,
            "host.name": os.uname().nodename,
            "miner_guard.name": state.root.name,
        }
        self._resource = Resource.create(identity).merge(OTELResourceDetector().detect())
        base = f"{str(settings.endpoint).rstrip('/')}/v1"
        logs = log.watched(OTLPLogExporter(endpoint=f"{base}/logs"), "logs")
        spans = log.watched(OTLPSpanExporter(endpoint=f"{base}/traces"), "traces")
        self._metrics = log.watched(OTLPMetricExporter(endpoint=f"{base}/metrics"), "metrics")
        self._metrics_every_s = 60.0
        with contextlib.suppress(KeyError, ValueError):
            self._metrics_every_s = float(os.environ["OTEL_METRIC_EXPORT_INTERVAL"]) / 1000
        self._logs = LoggerProvider(self._resource, shutdown_on_exit=False)
        self._logs.add_log_record_processor(BatchLogRecordProcessor(logs))
        self._logger = self._logs.get_logger("miner_guard", __version__)
        self._spans = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        self._spans.add_span_processor(BatchSpanProcessor(spans))
        self._tracer = self._spans.get_tracer("miner_guard", __version__)
        self._run_id = run_id
        self._after: int | None = None

    def finish(self) -> None:
        """The guard has written its last event: send what is left, and end."""
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
        if self._after is None:
            self._after = self._record.before_run(self._run_id)
        for event in self._record.events(min_level="info", after=self._after):
            self._after = event.id
            record = _log_record(event)
            self._logger.emit(record)
            name, field = _SPANS.get(event.name, ("", ""))
            length_s = event.fields.get(field)
            if length_s is not None:
                at, length = record.timestamp or 0, round(length_s * 1e9)
                begin = at if name == "restart" else at - length
                span = self._tracer.start_span(name, start_time=begin, attributes=record.attributes)
                span.end(begin + length)

    def _export_metrics(self) -> None:
        """Send the figures of /metrics as they are now."""
        scope = InstrumentationScope("miner_guard", __version__)
        metrics = metrics_of(read_status(self._state) or StatusDocument())
        in_scope = ScopeMetrics(scope, list(metrics), "")
        self._metrics.export(MetricsData([ResourceMetrics(self._resource, [in_scope], "")]))


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


def metrics_of(status: StatusDocument) -> Iterator[Metric]:
    """The families of /metrics with OpenTelemetry's names and types."""
    now = time.time_ns()
    since = status.metrics.since
    start = now if since is None else round(parse_iso_utc(since) * 1e9)
    for family in metrics.Families(status, __version__).collect():
        # OpenTelemetry keeps units out of names: `repo_age_seconds` is `repo_age` in seconds.
        stem, _, last = family.name.removeprefix(metrics.PREFIX).rpartition("_")
        name = NAMESPACE + (stem if last in _UNITS else f"{stem}_{last}".strip("_"))
        points = [
            NumberDataPoint(_labels(sample), start, now, sample.value) for sample in family.samples
        ]
        data: Gauge | Sum | Histogram
        if family.type == "gauge":
            data = Gauge(points)
        elif family.type == "counter":
            data = Sum(points, AggregationTemporality.CUMULATIVE, True)
        elif family.type == "histogram":
            data = _histogram(family.samples, start, now)
        else:
            continue
        yield Metric(name, family.documentation, _UNITS.get(last, "1"), data)


def _labels(sample: Any) -> dict[str, str]:
    return {NAMESPACE + key: text for key, text in sample.labels.items() if text}


def _histogram(samples: Iterable[Any], start: int, now: int) -> Histogram:
    """Prometheus counts what is at most a bound; OpenTelemetry, what is between two."""
    below = {s.labels["le"]: int(s.value) for s in samples if s.name.endswith("_bucket")}
    (total,) = (s.value for s in samples if s.name.endswith("_sum"))
    counts = [each - before for before, each in itertools.pairwise([0, *below.values()])]
    bounds = [float(bound) for bound in below][:-1]
    # Its extremes are unknown; the type does not allow for that, the wire does.
    extremes: Any = None
    point = HistogramDataPoint(
        {}, start, now, sum(counts), total, counts, bounds, extremes, extremes
    )
    return Histogram([point], AggregationTemporality.CUMULATIVE)
