"""The processes that run beside the guard: the HTTP port and the OTLP exporter. They read what the
guard has written, so their failures affect neither the guard nor the miner."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from miner_guard.config import optional_deps
from miner_guard.rank.layout import Now
from miner_guard.record.events import Event, degraded, event
from miner_guard.record.redaction import without_secrets
from miner_guard.record.status_document import MetricsStatus
from miner_guard.system import helpers
from miner_guard.system.children import Backoff, own_module
from miner_guard.system.clock import iso_utc
from miner_guard.system.readiness import ready
from miner_guard.watch.base import Context, Monitor

_START_S = 20.0
_KILL_S = 1.0
"""Time to wait after SIGKILL; a process stuck in the kernel is left behind."""

_MAX_LINE = 64 * 1024


@dataclass(frozen=True)
class HelperSpec:
    """The program to run, and the wording for its failures."""

    job: str
    """Name of the job that starts it."""

    module: str
    order: Mapping[str, Any]
    """Its settings, sent as one line of JSON on its stdin; never on its command line, since they
    may hold secrets."""

    env: Mapping[str, str]
    failure: str
    """What to report as unavailable while it is not running, such as `no HTTP port`."""

    refusal: str = "its process exited before it answered"
    """The likely reason if it exits without an answer."""


class HelperProcess:
    """Starts the process in a job, and restarts it with growing backoff when it exits.

    With `on_answer`, the process acknowledges its settings with one line on stdout, which
    `on_answer` receives; otherwise it counts as running once it has been started.
    """

    def __init__(
        self, context: Context, spec: HelperSpec, on_answer: Callable[[str], None] | None = None
    ) -> None:
        self._context, self._spec, self._on_answer = context, spec, on_answer
        self.reason: str | None = None
        """Why it is not running; None while it is running or has not failed yet."""

        self.child: subprocess.Popen[bytes] | None = None
        self.running = False
        """True once it is running and, if an answer is expected, has answered."""

        self._again_at: float | None = None
        self._started_at = context.clock.monotonic()
        self._backoff = Backoff()
        self._stopping = False
        self._rest = b""

    def start(self) -> None:
        """Start it in a job, which waits for its answer."""
        self._context.jobs.once(self._spec.job, self._open)

    def tick(self, now: float) -> list[str]:
        """Restart it if it has exited and its backoff is over. Returns the lines that it has
        written since its answer."""
        lines = self._lines() if self.running else []
        if self.running and self.child is not None and self.child.poll() is not None:
            self._close()
            self._failed("its process exited")
        if self._again_at is not None and now >= self._again_at:
            self._again_at = None
            self.start()
        return lines

    def stop(self) -> None:
        """Kill it."""
        self._stopping = True
        if self.running:
            self._close()
        elif self.child is not None:
            # Leave the pipe open: the job that waits for the answer still needs it, and closes it.
            self.child.kill()

    def let_finish(self) -> None:
        """Close its stdin. It then finishes its work and exits, possibly after the guard."""
        self._stopping = True
        if self.child is not None:
            _let_finish(self.child)

    def _open(self) -> None:
        spec = self._spec
        child = subprocess.Popen(
            own_module(spec.module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # A line that follows the answer must stay in the pipe, where `_lines` finds it.
            bufsize=0,
            env=dict(spec.env),
            start_new_session=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(dict(spec.order)).encode() + b"\n")
        self.child = child
        if self._on_answer is None:
            if self._stopping:
                _let_finish(child)
            self._is_running(child)
            return
        readable, _ = ready([child.stdout], _START_S)
        answer = child.stdout.readline(_MAX_LINE).strip().decode() if readable else ""
        if self._stopping:
            self._close()
        elif answer:
            self._on_answer(answer)
            self._is_running(child)
        else:
            self._close()
            self._failed(spec.refusal)

    def _is_running(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        self._rest, self.reason = b"", None
        self._started_at = self._context.clock.monotonic()
        self.running = True

    def _lines(self) -> list[str]:
        assert self.child is not None
        assert self.child.stdout is not None
        piece = b""
        with contextlib.suppress(BlockingIOError):
            piece = os.read(self.child.stdout.fileno(), _MAX_LINE)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line.decode(errors="replace") for line in lines if line]

    def _failed(self, reason: str) -> None:
        now = self._context.clock.monotonic()
        lived_s = now - self._started_at if self.running else 0.0
        self._again_at = now + self._backoff.ended(lived_s)
        if self._backoff.first:
            what = f"{self._spec.failure}: {reason}; retrying with backoff"
            self._context.emit(degraded(what))
        self.running, self.reason = False, reason

    def _close(self) -> None:
        child, self.child = self.child, None
        if child is None:
            return
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_KILL_S)


def _let_finish(child: subprocess.Popen[bytes]) -> None:
    helpers.let_outlive(child.pid)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()


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
            "gate": dataclasses.asdict(config.gate),
        }
        return HelperSpec(
            "http port",
            "miner_guard.show.http",
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

    def on_event(self, event: Event) -> Iterable[Event]:
        self._events[event.name] = self._events.get(event.name, 0) + 1
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        if self._server is not None:
            self._server.tick(now)
        return ()

    def on_stop(self) -> Iterable[Event]:
        if self._server is not None:
            self._server.stop()
        return ()

    def snapshot(self) -> Mapping[str, Any]:
        reason = self._problem if self._server is None else self._server.reason
        url = self._url if self._server is not None and self._server.running else None
        return MetricsStatus(dict(self._events), self._since, url, reason).to_json()


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
        order = {
            "state": str(self.context.state.root),
            "run_id": self.context.run_id,
            "endpoint": endpoint,
            "guard_pid": os.getpid(),
        }
        env = {
            **without_secrets(os.environ),
            **{name: value for name, value in os.environ.items() if name.startswith(_SDKS_OWN)},
        }
        return HelperSpec("OTLP export", "miner_guard.show.otel", order, env, "no OTLP export")

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        if self._sender is None:
            return
        for line in self._sender.tick(now):
            yield self._understood(json.loads(line))

    def _understood(self, document: Mapping[str, Any]) -> Event:
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

    def on_stop(self) -> Iterable[Event]:
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
