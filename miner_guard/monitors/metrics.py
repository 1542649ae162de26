"""Metrics: counts events and, if a port is configured, keeps the HTTP server process alive."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from miner_guard.config import optional_deps
from miner_guard.eventlog.catalog import CATALOGUE, Finding, make_finding
from miner_guard.flight_recorder.records import Now
from miner_guard.monitors.base import Context, Monitor
from miner_guard.system.backoff import Backoff

MIN_TOKEN_LENGTH = 16
"""Required beyond loopback. 16 random hexadecimal digits are 64 bits: guessing that over the
network is hopeless."""

_START_S = 20.0
_KILL_S = 1.0
"""Time to wait after SIGKILL; a process stuck in the kernel is left behind."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class MetricsMonitor(Monitor):
    """Starts the server process in a job, and restarts it with growing backoff when it exits
    unexpectedly."""

    name = "metrics"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._events: dict[str, int] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._url: str | None = None
        self._reason: str | None = None
        self._again_at: float | None = None
        self._opened_at = context.clock.monotonic()
        self._backoff = Backoff()
        self._stopping = False
        http = context.config.http
        if http.port is not None and (problem := self._problem()) is None:
            context.jobs.once("http port", self._open)
        elif http.port is not None:
            self._reason = problem
            context.emit(make_finding("guard_degraded", what=f"no HTTP port: {problem}"))

    def _problem(self) -> str | None:
        http = self.context.config.http
        if not _is_loopback(http.host):
            if not http.token:
                return (
                    f"host {http.host} is not loopback and no token is set; set "
                    "MINER_GUARD_HTTP__TOKEN"
                )
            if len(http.token) < MIN_TOKEN_LENGTH:
                return (
                    f"host {http.host} is not loopback and the token has {len(http.token)} "
                    "characters; give one of at "
                    f"least {MIN_TOKEN_LENGTH}, for example MINER_GUARD_HTTP__TOKEN=$(openssl "
                    "rand -hex 32)"
                )
        return optional_deps.problem("http")

    def _open(self) -> None:
        config = self.context.config
        order = {
            "state": str(self.context.state.root),
            **dataclasses.asdict(config.http),
            "hang": dataclasses.asdict(config.hang),
            "gate": dataclasses.asdict(config.gate),
        }
        child = subprocess.Popen(
            [sys.executable, "-m", "miner_guard.reporting.http_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ,
            start_new_session=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        self._child = child
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(order).encode() + b"\n")
            child.stdin.flush()
        readable, _, _ = select.select([child.stdout], [], [], _START_S)
        port = child.stdout.readline().strip().decode() if readable else ""
        if self._stopping:
            self._close()
        elif port.isdigit():
            host = f"[{config.http.host}]" if ":" in config.http.host else config.http.host
            self._url, self._reason = f"http://{host}:{port}/", None
            self._opened_at = self.context.clock.monotonic()
            self.context.emit(make_finding("http_listening", url=self._url))
        else:
            self._close()
            self._failed(
                f"port {config.http.port} on {config.http.host} could not be opened; is it in use?"
            )

    def _failed(self, reason: str) -> None:
        now = self.context.clock.monotonic()
        lived_s = now - self._opened_at if self._url is not None else 0.0
        self._again_at = now + self._backoff.ended(lived_s)
        if self._backoff.first:
            what = f"no HTTP port: {reason}; retrying with backoff"
            self.context.emit(make_finding("guard_degraded", what=what))
        self._url, self._reason = None, reason

    def _close(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_KILL_S)

    def on_finding(self, finding: Finding) -> Iterable[Finding]:
        if finding.event in CATALOGUE:
            self._events[finding.event] = self._events.get(finding.event, 0) + 1
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Finding]:
        if self._url is not None and self._child is not None and self._child.poll() is not None:
            self._close()
            self._failed("its process ended")
        if self._again_at is not None and now >= self._again_at:
            self._again_at = None
            self.context.jobs.once("http port", self._open)
        return ()

    def on_stop(self) -> Iterable[Finding]:
        self._stopping = True
        child = self._child
        if self._url is not None:
            self._close()
        elif child is not None:
            # The child is still starting: the job that waits for its answer closes it and needs the
            # pipe.
            child.kill()
        return ()

    def snapshot(self) -> Mapping[str, Any]:
        return {"events": dict(self._events), "url": self._url, "reason": self._reason}
