"""The HTTP port: `python -m miner_guard.show.http`, a separate process alongside the
supervisor.

It reads run.db like any other reader, so abuse of the port never reaches the
miner or the guard. It receives its settings as one line of JSON on stdin (never on the command
line, since they include the token), replies with one line that contains the port, and exits at EOF
on stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import math
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from miner_guard import __version__, state_dir
from miner_guard.config import GateSettings
from miner_guard.record.status_document import read_status
from miner_guard.record.store import RunReader
from miner_guard.show import metrics
from miner_guard.show.charts import curves
from miner_guard.show.data import Data, LogReader
from miner_guard.show.report import body, page, template, title_of
from miner_guard.show.sections import inline
from miner_guard.system import children
from miner_guard.watch.state_words import (
    find_the_guard,
    headline,
    problem,
    read_state,
    state_since,
    with_axes,
)

PATIENCE_S = 10.0
"""Connections without a complete request after this many seconds are closed."""

_MAX_CONNECTIONS = 512
_OPEN = frozenset({"/", "/healthz", "/live.js", "/chart.js"})
"""Paths that need no token: the miner's progress, and a page and scripts that contain no data."""

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^:\[\]]+)(:\d{1,5})?")
"""A `Host` header: a name or an address, IPv6 in brackets, and perhaps a port."""

_MAX_TIME = 2.0**33
"""The last moment that a page can show, in the year 2242."""

_RANGES_S = {"1h": 3600.0, "6h": 21600.0, "24h": 86400.0, "7d": 604800.0}
"""The report's time ranges by their name in the URL; any other name means the whole run."""

_HEADERS = {
    # The curves and bars set their widths and colours in `style` attributes.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class ServerSettings:
    """The HTTP port's settings."""

    state: str
    host: str
    port: int
    token: str | None = None
    gate: dict[str, Any] = field(default_factory=dict)


def host_is_trusted(header: str) -> bool:
    """Return whether a `Host` header is `localhost` or an IP address, with or without a port.

    A web page can point its domain at this port (DNS rebinding) and read the responses, since the
    browser regards the port as part of the page's own site. It cannot make the browser send another
    name, or an address, in `Host`.
    """
    named = _HOST.fullmatch(header.strip().lower())
    if named is None:
        return False
    host = named["name"].strip("[]")
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return host.rstrip(".") == "localhost"


class Site:
    """The routes. With a token, all but `_OPEN` require it; the page at `/` asks for it."""

    def __init__(self, order: ServerSettings) -> None:
        self._state = state_dir.StateDir(Path(order.state))
        self._token = order.token
        self._report = LiveReport(self._state, GateSettings(**order.gate))
        live = template("live.html").replace("{{find the guard}}", inline(find_the_guard()))
        self._page = page("miner-guard", live)
        threading.Thread(target=self._report.read, daemon=True, name="read the log").start()

    def app(self) -> Starlette:
        routes = [
            Route("/", self.page),
            Route("/live.js", self.script),
            Route("/chart.js", self.script),
            Route("/report", self.report),
            Route("/metrics", self.metrics),
            Route("/healthz", self.healthz),
            Route("/status", self.status),
        ]
        return Starlette(
            routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=self._guarded)]
        )

    async def _guarded(self, request: Request, answer: RequestResponseEndpoint) -> Response:
        if self._token is None and not host_is_trusted(request.headers.get("host", "")):
            response = self._misdirected(request)
        elif request.url.path in _OPEN or self._admitted(request):
            response = await answer(request)
        else:
            bearer = {"WWW-Authenticate": "Bearer"}
            response = PlainTextResponse("a bearer token is required\n", 401, bearer)
        response.headers.update(_HEADERS)
        return response

    def _admitted(self, request: Request) -> bool:
        if self._token is None:
            return True
        # Starlette decodes header bytes as latin-1, whatever the client sent.
        given = request.headers.get("authorization", "").encode("latin-1")
        return hmac.compare_digest(given, f"Bearer {self._token}".encode())

    def _misdirected(self, request: Request) -> Response:
        name = request.headers.get("host", "").encode("ascii", "replace").decode()[:100]
        return PlainTextResponse(
            (
                f"without a token, this port does not accept the host name {name!r}: set [http] "
                "token, or use an IP address\n"
            ),
            421,
        )

    async def metrics(self, request: Request) -> Response:
        """The metrics, for Prometheus to scrape."""
        status = read_status(self._state)
        if status is None:
            return PlainTextResponse("no status yet\n", 503)
        body = metrics.text(status, version=__version__)
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def healthz(self, request: Request) -> Response:
        """200 while the miner is making progress, else 503. The first line is the state; it
        includes the cause only for a client that may read the status."""
        status = read_status(self._state)
        state, wrong = read_state(status), problem(status)
        first = headline(state) if self._admitted(request) else state_since(state)
        return PlainTextResponse(
            f"{first}\n{'progressing' if wrong is None else 'not progressing'}\n",
            200 if wrong is None else 503,
        )

    async def status(self, request: Request) -> Response:
        """Return the present state, with the run's state as every view shows it."""
        status = read_status(self._state)
        if status is None:
            return JSONResponse({"error": "no status yet"}, 503)
        return JSONResponse(with_axes(status, RunReader(self._state.db).now()))

    async def page(self, request: Request) -> Response:
        """The live page; its script fetches the report."""
        return HTMLResponse(self._page)

    async def report(self, request: Request) -> Response:
        """The report's sections as of now, over `?range=1h|6h|24h|7d|all` or `?from=…&to=…`."""
        try:
            asked = TimeRange.of(request.query_params)
        except ValueError as error:
            return PlainTextResponse(f"{error}\n", 400)
        return HTMLResponse(await run_in_threadpool(self._report.render, asked))

    async def script(self, request: Request) -> Response:
        """One of the live page's scripts."""
        return Response(template(request.url.path[1:]), media_type="text/javascript")


@dataclass(frozen=True)
class TimeRange:
    """The time range that a request asks for."""

    name: str = "all"
    start: float | None = None
    end: float | None = None
    """Bounds of the range selected on a curve, in seconds since 1970; either both or neither are
    set."""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> TimeRange:
        """Parse `?range=24h` or `?from=SECONDS&to=SECONDS`; an unknown range means the whole run.
        Raises ValueError for times that are none."""
        if "from" not in query and "to" not in query:
            return cls(query.get("range", "all"))
        try:
            start, end = float(query["from"]), float(query["to"])
        except (KeyError, ValueError):
            start = end = math.nan
        if not 0 <= start < end <= _MAX_TIME:
            raise ValueError("from and to are seconds since 1970, from before to")
        return cls("chosen", start, end)

    def of_run(self, data: Data) -> Data:
        """The data within this range."""
        if self.start is not None and self.end is not None:
            return data.window(self.start, self.end)
        span = _RANGES_S.get(self.name)
        if span is None or data.last is None:
            return data
        return data.window(data.last - span, data.last)


class LiveReport:
    """A report on a growing log: each refresh reads only the lines written since the last one."""

    def __init__(self, state: state_dir.StateDir, gate: GateSettings) -> None:
        self._state, self._gate = state, gate
        self._reader: LogReader | None = None
        self._mutex = threading.Lock()
        self._plots: dict[str, tuple[float, str]] = {}
        """For each range, when its curves were drawn, and the resulting HTML. A week's curves
        change by only one column every twenty minutes."""

    def read(self) -> None:
        """Read the existing log, so that the first visitor does not have to wait for it."""
        with self._mutex:
            self._refreshed()

    def _refreshed(self) -> Data:
        if self._reader is None:
            self._reader = LogReader(self._state)
        return self._reader.refresh()

    def render(self, range_: TimeRange) -> str:
        """A complete HTML document whose body is the report for a range."""
        with self._mutex:
            whole = self._refreshed()
            data = range_.of_run(whole)
            title = title_of(data, self._state)
            pushes = RunReader(self._state.db).rows("upload")
            content = body(
                title, data, whole, self._gate, pushes=pushes, plots=self._curves(range_, data)
            )
            return page(title, content)

    def _curves(self, range_: TimeRange, data: Data) -> str:
        if range_.start is not None:
            return curves(data, self._gate)
        span = (data.last or 0.0) - (data.first or 0.0)
        now = time.monotonic()
        key = range_.name if range_.name in _RANGES_S else "all"
        drawn_at, drawn = self._plots.get(key, (-math.inf, ""))
        if now - drawn_at > min(120.0, max(5.0, span / 500)):
            drawn = curves(data, self._gate)
            self._plots[key] = (now, drawn)
        return drawn


class Impatient(H11Protocol):
    """Closes connections whose request does not arrive in time: slow clients must not exhaust the
    file descriptors."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(PATIENCE_S, self._look)

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self.loop.call_later(PATIENCE_S, self._look)


class _Server(uvicorn.Server):
    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
            sys.stdout.flush()


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    """Entry point of the child process."""
    children.continue_when_the_parent_dies()
    order = ServerSettings(**json.loads(sys.stdin.readline()))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(_MAX_CONNECTIONS, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    # A flood of requests must slow only this process: the miner has priority on the CPU.
    os.nice(10)
    config = uvicorn.Config(
        Site(order).app(),
        host=order.host,
        port=order.port,
        http=Impatient,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_level="critical",
        access_log=False,
        timeout_keep_alive=5,
        backlog=128,
        server_header=False,
    )
    _Server(config).run()


if __name__ == "__main__":
    main()
