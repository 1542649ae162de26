"""An OTLP/HTTP receiver for tests that decodes requests with OpenTelemetry's own messages."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support import requires


def plain(value: Any) -> Any:
    """Convert an AnyValue to a Python value."""
    kind = value.WhichOneof("value")
    if kind == "kvlist_value":
        return attributes(value.kvlist_value.values)
    if kind == "array_value":
        return [plain(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None


def attributes(pairs: Any) -> dict[str, Any]:
    """A list of KeyValue as a dict."""
    return {pair.key: plain(pair.value) for pair in pairs}


class Receiver:
    """Answers with status `answer` (200 at first); keeps the data that it accepts if that is
    200."""

    def __init__(self, port: int = 0) -> None:
        requires.module("opentelemetry.proto")
        from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces

        self.logs: list[logs.ExportLogsServiceRequest] = []
        self.metrics: list[metrics.ExportMetricsServiceRequest] = []
        self.traces: list[traces.ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.answer = 200
        kinds: dict[str, tuple[list[Any], Any]] = {
            "/v1/logs": (self.logs, logs.ExportLogsServiceRequest),
            "/v1/metrics": (self.metrics, metrics.ExportMetricsServiceRequest),
            "/v1/traces": (self.traces, traces.ExportTraceServiceRequest),
        }
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                accepted, request = kinds[self.path]
                if outer.answer == 200:
                    accepted.append(request.FromString(body))
                outer.headers.append(dict(self.headers.items()))
                # An empty body is the message of a full success.
                self.send_response(outer.answer)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_arguments: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.server.server_port
        self.endpoint = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def records(self) -> Iterator[tuple[dict[str, Any], Any]]:
        """Each log record with its resource's attributes, in the order of arrival."""
        for request in list(self.logs):
            for group in request.resource_logs:
                resource = attributes(group.resource.attributes)
                for scope in group.scope_logs:
                    for record in scope.log_records:
                        yield resource, record

    def events(self) -> list[str]:
        """The names of the events without their namespace, in the order of arrival."""
        return [record.event_name.removeprefix("miner_guard.") for _, record in self.records()]

    def lengths_s(self) -> dict[str, float]:
        """The latest span of each name, and its length."""
        return {
            span.name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
            for request in list(self.traces)
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        }

    def latest_metrics(self) -> dict[str, Any]:
        """The metrics of the latest export by name."""
        (group,) = self.metrics[-1].resource_metrics
        return {m.name: m for scope in group.scope_metrics for m in scope.metrics}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
