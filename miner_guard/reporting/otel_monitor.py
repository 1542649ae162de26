"""OpenTelemetry: runs the process that exports events and metrics over OTLP, and restarts it if it
exits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from miner_guard.config import optional_deps
from miner_guard.eventlog.catalog import Finding
from miner_guard.rank.layout import Now
from miner_guard.record.events import degraded, event
from miner_guard.record.redaction import without_secrets
from miner_guard.reporting.helper_process import HelperProcess, HelperSpec
from miner_guard.watch.base import Context, Monitor

_SDKS_OWN = "OTEL_"
"""Prefix of the variables that configure the SDK; `OTEL_EXPORTER_OTLP_HEADERS` holds a secret."""


class OtelMonitor(Monitor):
    """Runs the OTLP sender. Inactive unless `[otel] endpoint` is set."""

    name = "otel"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._endpoint = context.config.otel.endpoint
        self._problem: str | None = None
        self._sender: HelperProcess | None = None
        self._failing: dict[str, str] = {}
        if self._endpoint is None:
            return
        if (problem := self._why_not(self._endpoint)) is not None:
            self._problem = problem
            context.emit(degraded(f"no OTLP export: {problem}"))
            return
        self._sender = HelperProcess(context, self._spec(self._endpoint))
        self._sender.start()

    @staticmethod
    def _why_not(endpoint: str) -> str | None:
        if not endpoint.startswith(("http://", "https://")):
            return (
                f"[otel] endpoint {endpoint} does not begin with http:// or https://; the guard "
                "speaks OTLP/HTTP, usually on port 4318"
            )
        return optional_deps.problem("otel")

    def _spec(self, endpoint: str) -> HelperSpec:
        settings = self.context.config.otel
        order = {
            "state": str(self.context.state.root),
            "run_id": self.context.run_id,
            "endpoint": endpoint,
            "min_level": settings.min_level,
            "metrics_every_s": settings.metrics_every_s,
            "guard_pid": os.getpid(),
        }
        env = {
            **without_secrets(os.environ),
            **{name: value for name, value in os.environ.items() if name.startswith(_SDKS_OWN)},
        }
        return HelperSpec("OTLP export", "miner_guard.reporting.otel", order, env, "no OTLP export")

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Finding]:
        if self._sender is None:
            return
        for line in self._sender.tick(now):
            yield self._understood(json.loads(line))

    def _understood(self, document: Mapping[str, Any]) -> Finding:
        if (signal := document.get("recovered")) is not None:
            self._failing.pop(str(signal), None)
            return event(
                "otlp_recovered",
                "info",
                f"OTLP RECOVERED: {signal} to {self._endpoint}",
                signal=signal,
                endpoint=self._endpoint,
            )
        signal, reason = str(document["failing"]), self.context.redactor.text(document["reason"])
        self._failing[signal] = reason
        return event(
            "otlp_failing",
            "warning",
            f"OTLP FAILING: {signal} to {self._endpoint}: {reason}",
            signal=signal,
            endpoint=self._endpoint,
            reason=reason,
        )

    def on_stop(self) -> Iterable[Finding]:
        if self._sender is not None:
            self._sender.let_finish()
        return ()

    def snapshot(self) -> Mapping[str, Any]:
        sender = self._sender
        return {
            "endpoint": self._endpoint,
            "reason": self._problem if sender is None else sender.reason,
            "failing": dict(self._failing),
        }
