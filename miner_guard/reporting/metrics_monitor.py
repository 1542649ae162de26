"""Metrics: counts events and, if a port is configured, keeps the HTTP server process alive."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
from collections.abc import Iterable, Mapping
from typing import Any

from miner_guard.config import optional_deps
from miner_guard.eventlog.catalog import Finding
from miner_guard.eventlog.status_document import MetricsStatus
from miner_guard.rank.layout import Now
from miner_guard.record.events import degraded, event
from miner_guard.reporting.helper_process import HelperProcess, HelperSpec
from miner_guard.system.clock import iso_utc
from miner_guard.watch.base import Context, Monitor

MIN_TOKEN_LENGTH = 16
"""The shortest token accepted if the port is not on loopback. 16 random hexadecimal digits are 64
bits: guessing that over the network is hopeless."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class MetricsMonitor(Monitor):
    """Without a configured port it only counts events."""

    name = "metrics"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._events: dict[str, int] = {}
        self._since = iso_utc(context.clock.wall())
        self._url: str | None = None
        self._problem: str | None = None
        self._server: HelperProcess | None = None
        if context.config.http.port is None:
            return
        if (problem := self._why_not()) is not None:
            self._problem = problem
            context.emit(degraded(f"no HTTP port: {problem}"))
            return
        self._server = HelperProcess(context, self._spec(), self._listening)
        self._server.start()

    def _why_not(self) -> str | None:
        http = self.context.config.http
        if not _is_loopback(http.host):
            if not http.token:
                return (
                    f"host {http.host} is not a loopback address and no token is set; set "
                    "MINER_GUARD_HTTP__TOKEN"
                )
            if len(http.token) < MIN_TOKEN_LENGTH:
                return (
                    f"host {http.host} is not a loopback address and the token has only "
                    f"{len(http.token)} characters; use at least "
                    f"{MIN_TOKEN_LENGTH}, for example MINER_GUARD_HTTP__TOKEN=$(openssl "
                    "rand -hex 32)"
                )
        return optional_deps.problem("http")

    def _spec(self) -> HelperSpec:
        config = self.context.config
        http = config.http
        order = {
            "state": str(self.context.state.root),
            **dataclasses.asdict(http),
            "hang": dataclasses.asdict(config.hang),
            "gate": dataclasses.asdict(config.gate),
        }
        return HelperSpec(
            "http port",
            "miner_guard.reporting.http_server",
            order,
            os.environ,
            "no HTTP port",
            f"port {http.port} on {http.host} could not be opened; is it in use?",
        )

    def _listening(self, port: str) -> None:
        host = self.context.config.http.host
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        self.context.emit(
            event(
                "http_listening",
                "info",
                f"HTTP {self._url} (metrics, healthz, status)",
                url=self._url,
            )
        )

    def on_finding(self, finding: Finding) -> Iterable[Finding]:
        self._events[finding.name] = self._events.get(finding.name, 0) + 1
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Finding]:
        if self._server is not None:
            self._server.tick(now)
        return ()

    def on_stop(self) -> Iterable[Finding]:
        if self._server is not None:
            self._server.stop()
        return ()

    def snapshot(self) -> Mapping[str, Any]:
        reason = self._problem if self._server is None else self._server.reason
        url = self._url if self._server is not None and self._server.running else None
        return MetricsStatus(dict(self._events), self._since, url, reason).to_json()
