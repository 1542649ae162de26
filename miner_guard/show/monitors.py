"""The monitors that let other programs read along: the HTTP port and the OTLP export. Both run in
threads of the guard that read run.db, and only if they are configured."""

from __future__ import annotations

import bisect
import ipaddress
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from miner_guard.config import HttpSettings, optional_deps
from miner_guard.rank.layout import FLAG_FIRST, Now, StepRecord
from miner_guard.record.events import Event, degraded, recovered
from miner_guard.record.status_document import Histogram, MetricsStatus
from miner_guard.system.clock import iso_utc
from miner_guard.watch.base import Context, Monitor

if TYPE_CHECKING:
    from miner_guard.show.http import PortThread
    from miner_guard.show.otel import Exporter

MIN_TOKEN_LENGTH = 16
"""The shortest token accepted if the port is not on loopback. 16 random hexadecimal digits are 64
bits: guessing that over the network is hopeless."""

_STEP_BOUNDS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 300, 600)
"""With source 004's limits among them: good to 20 s, acceptable to 40 s, slow from 60 s."""

_AGAIN_S = 30.0
"""A port that could not be opened is tried again after this long."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _refusal(http: HttpSettings) -> str | None:
    """Why these settings open no port; None if they do."""
    if not _is_loopback(http.host):
        if not http.token:
            return (
                f"host {http.host} is not a loopback address and no token is set; set "
                "MINER_GUARD_HTTP__TOKEN"
            )
        if len(http.token) < MIN_TOKEN_LENGTH:
            return (
                f"host {http.host} is not a loopback address and the token has only "
                f"{len(http.token)} characters; use at least {MIN_TOKEN_LENGTH}, for example "
                "MINER_GUARD_HTTP__TOKEN=$(openssl rand -hex 32)"
            )
    return optional_deps.problem("http")


class Durations:
    """Counts durations in classic buckets, whose sums over a fleet still mean something."""

    def __init__(self, *bounds_s: float) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def histogram(self) -> Histogram:
        names = [*(f"{bound:g}" for bound in self._bounds_s), "+Inf"]
        return Histogram(
            dict(zip(names, itertools.accumulate(self._counts), strict=True)), self._sum_s
        )


class MetricsMonitor(Monitor):
    """Opens the HTTP port, and counts events and durations; without a configured port it only
    counts."""

    name = "metrics"
    order = 80

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._events: dict[str, int] = {}
        self._durations = {
            "step_seconds": Durations(*_STEP_BOUNDS_S),
            "upload_seconds": Durations(1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800),
            "recovery_seconds": Durations(5, 10, 30, 60, 120, 300, 600, 1800, 3600),
        }
        self._ranks: set[int] = set()
        self._hung_at: float | None = None
        self._since = iso_utc(context.clock.wall())
        self._port: PortThread | None = None
        self._reason: str | None = None
        self._open_at = float("inf")
        http = context.config.http
        if http.port is None:
            return
        self._reason = _refusal(http)
        if self._reason is not None:
            context.emit(degraded(f"no HTTP port: {self._reason}"))
        else:
            self._open_at = context.clock.monotonic()

    def on_event(self, event: Event) -> Iterable[Event]:
        self._events[event.name] = self._events.get(event.name, 0) + 1
        took_s = event.fields.get("took_s")
        if event.name == "upload_succeeded" and took_s is not None:
            self._durations["upload_seconds"].observe(took_s)
        if event.name == "hang_detected" and self._hung_at is None:
            self._hung_at = self.context.clock.monotonic()
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Event]:
        self._ranks.add(rank)
        for step in steps if rank == min(self._ranks) else ():
            # The first one includes compiling and loading.
            if not step.flags & FLAG_FIRST:
                self._durations["step_seconds"].observe(step.seconds)
            if self._hung_at is not None and step.end > self._hung_at:
                self._durations["recovery_seconds"].observe(step.end - self._hung_at)
                self._hung_at = None
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        if ranks:
            # After a new rendezvous this node may have different ranks.
            self._ranks &= ranks.keys()
        if self._port is not None and not self._port.alive:
            self._port, self._open_at, self._reason = None, now, "the server has ended"
        if now < self._open_at:
            return
        # Import the server here: a guard without a port pays nothing for it.
        from miner_guard.show.http import PortThread, Site

        config = self.context.config
        try:
            site = Site(self.context.state, config.http, config.gate, self.context.emit)
            self._port = PortThread(site, config.http)
        except OSError as error:
            first, self._open_at = self._reason is None, now + _AGAIN_S
            self._reason = (
                f"port {config.http.port} on {config.http.host} could not be opened "
                f"({error.strerror or error}); is it in use?"
            )
            if first:
                yield degraded(f"no HTTP port: {self._reason} Trying again every {_AGAIN_S:.0f} s")
            return
        again, self._reason, self._open_at = self._reason is not None, None, float("inf")
        words = f"HTTP {self._url} (page, metrics, healthz, status)"
        opened = recovered(words, url=self._url)
        yield opened if again else replace(opened, text=words)

    @property
    def _url(self) -> str | None:
        host = self.context.config.http.host
        shown = f"[{host}]" if ":" in host else host
        return None if self._port is None else f"http://{shown}:{self._port.port}/"

    def on_stop(self) -> Iterable[Event]:
        if self._port is not None:
            self._port.close()
            self._port = None
        self._open_at = float("inf")
        return ()

    def snapshot(self) -> Mapping[str, Any]:
        took = {name: durations.histogram() for name, durations in self._durations.items()}
        events = dict(self._events)
        return MetricsStatus(events, took, self._since, self._url, self._reason).to_json()


class OtelMonitor(Monitor):
    """Exports events and metrics. Inactive unless `[otel] endpoint` is set."""

    name = "otel"
    order = 80

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._endpoint = context.config.otel.endpoint
        self._exporter: Exporter | None = None
        self._failing: dict[str, str] = {}
        self._reason: str | None = None
        if self._endpoint is None:
            return
        if self._endpoint.startswith(("http://", "https://")):
            self._reason = optional_deps.problem("otel")
        else:
            self._reason = (
                f"[otel] endpoint {self._endpoint} does not begin with http:// or https://; the "
                "guard speaks OTLP/HTTP, usually on port 4318"
            )
        if self._reason is not None:
            context.emit(degraded(f"no OTLP export: {self._reason}"))
            return
        from miner_guard.show.otel import Exporter

        self._exporter = Exporter(context.state, context.run_id, context.config.otel, self._heard)
        self._exporter.start()

    def _heard(self, signal: str, reason: str | None) -> None:
        """A signal begins to fail, or works again (no reason). Called from the SDK's threads."""
        where: dict[str, Any] = {"signal": signal, "endpoint": self._endpoint}
        if reason is None:
            self._failing.pop(signal, None)
            self.context.emit(recovered(f"OTLP export of {signal} to {self._endpoint}", **where))
            return
        self._failing[signal] = reason = self.context.redactor.text(reason)
        words = f"OTLP export of {signal} to {self._endpoint} fails: {reason}"
        self.context.emit(degraded(words, **where, reason=reason))

    def finish(self) -> None:
        if self._exporter is not None:
            self._exporter.finish()

    def snapshot(self) -> Mapping[str, Any]:
        return {"endpoint": self._endpoint, "reason": self._reason, "failing": dict(self._failing)}
