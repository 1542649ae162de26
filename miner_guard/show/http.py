"""The HTTP port: the live page, its data, metrics, health and status, served from a thread of the
guard. It reads run.db as any reader does and changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import math
import re
import socket
import threading
from collections.abc import Callable, Mapping
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

from miner_guard import __version__
from miner_guard.config import GateSettings, HttpSettings
from miner_guard.record.events import Event, degraded
from miner_guard.record.status_document import read_document, read_status, running_guards
from miner_guard.record.store import RunReader
from miner_guard.record.words import defect, raised_at
from miner_guard.show import metrics, page
from miner_guard.show.series import Window
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import Once
from miner_guard.watch.state_words import (
    GREY,
    answers,
    problem,
    read_state,
    state_since,
    time_of_reading,
    urgency,
    with_axes,
)

PATIENCE_S = 10.0
"""Connections without a complete request after this many seconds are closed."""

_MAX_CONNECTIONS = 256
"""Further connections are closed at once: they must not exhaust the guard's file descriptors."""

_OPEN = frozenset({"/", "/healthz"})
"""Paths that need no token: the miner's progress, and a page that contains no data."""

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^:\[\]]+)(:\d{1,5})?")
"""A `Host` header: a name or an address, IPv6 in brackets, and perhaps a port."""

_MAX_TIME = 2.0**33
"""The last moment that a page can show, in the year 2242."""

_RANGES_S = {"1h": 3600.0, "6h": 21600.0, "24h": 86400.0, "7d": 604800.0}
"""The page's time ranges by their name in the URL; any other name means the whole run."""

_HEADERS = {
    "Content-Security-Policy": f"{page.policy()}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


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

    def __init__(
        self,
        state: StateDir,
        settings: HttpSettings,
        gate: GateSettings,
        report: Callable[[Event], None],
    ) -> None:
        """`report` is told, from the port's thread, of each place that raises."""
        self._state, self._token, self._gate = state, settings.token, gate
        self._report, self._reported = report, Once()

    def app(self) -> Starlette:
        routes = [
            Route("/", self.page),
            Route("/data", self.data),
            Route("/metrics", self.metrics),
            Route("/healthz", self.healthz),
            Route("/status", self.status),
        ]
        return Starlette(
            routes=routes,
            middleware=[Middleware(BaseHTTPMiddleware, dispatch=self._guarded)],
            exception_handlers={Exception: self._failed},
        )

    async def _failed(self, request: Request, error: Exception) -> Response:
        self._defect(request.url.path, error)
        text = "internal error: see `miner-guard logs --event guard_degraded`\n"
        return PlainTextResponse(text, 500, _HEADERS)

    def _defect(self, path: str, error: Exception) -> None:
        if self._reported.first((type(error), raised_at(error))):
            self._report(degraded(f"HTTP {path} failed: {defect(error)}; logged once"))

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
        header = request.headers.get("authorization", "").encode("latin-1")
        return hmac.compare_digest(header, f"Bearer {self._token}".encode())

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
        accept = request.headers.get("accept", "")
        body, kind = metrics.exposition(status, version=__version__, accept=accept)
        return Response(body, headers={"Content-Type": kind})

    async def healthz(self, request: Request) -> Response:
        """200 while the miner is making progress, else 503. The first line is the state; it
        includes the cause only for a client that may read the status."""
        status = read_status(self._state)
        wrong, (first, *_) = problem(status), answers(status)
        if not self._admitted(request):
            now = "" if status is None else time_of_reading(status)
            first = state_since(read_state(status), now)
        return PlainTextResponse(
            f"{first}\n{'progressing' if wrong is None else 'not progressing'}\n",
            200 if wrong is None else 503,
        )

    async def status(self, request: Request) -> Response:
        """Return the present state, with the run's state as every view shows it."""
        document = read_document(self._state)
        if not document:
            return JSONResponse({"error": "no status yet"}, 503)
        return JSONResponse(with_axes(document))

    async def page(self, request: Request) -> Response:
        """The live page, without data; its script asks for them."""
        return HTMLResponse(page.html(None))

    async def data(self, request: Request) -> Response:
        """What the page shows of `?range=1h|6h|24h|7d|all` or of `?from=…&to=…`; with `curves=0`
        all but the curves."""
        query = request.query_params
        try:
            window = window_of(query, RunReader(self._state.db))
        except ValueError as error:
            return PlainTextResponse(f"{error}\n", 400)
        drawn = query.get("curves") != "0"

        def read() -> dict[str, Any]:
            shown = page.document(self._state, self._gate, window, drawn=drawn)
            shown["others"] = []
            try:
                shown["others"] = others(self._state)
            except Exception as error:  # noqa: BLE001 - what other guards leave must not take this page away; it is reported
                self._defect("/data: other guards", error)
            return shown

        return JSONResponse(await run_in_threadpool(read))


def others(own: StateDir) -> list[dict[str, str]]:
    """The other guards of this user on this machine, worst first. Of each only what its open
    `/healthz` says as well, because it may have a token of its own."""
    read = ((s.root.name, read_status(s)) for s in running_guards() if s.root != own.root)
    found = [(name, status) for name, status in read if status is not None]
    return [
        {
            "name": status.name or name,
            "state": state_since(read_state(status), time_of_reading(status)),
            "kind": page.KINDS[read_state(status).colour or GREY],
            "url": status.metrics.url or "",
        }
        for name, status in sorted(found, key=lambda row: urgency(row[1]))
    ]


def window_of(query: Mapping[str, str], record: RunReader) -> Window:
    """The window of `?range=24h` or `?from=SECONDS&to=SECONDS`; an unknown range means the whole
    run. Raises ValueError for other times."""
    if "from" not in query and "to" not in query:
        span = _RANGES_S.get(query.get("range", "all"))
        ends = record.span()
        return Window() if span is None or ends is None else Window(ends[1] - span)
    try:
        start, end = float(query["from"]), float(query["to"])
    except (KeyError, ValueError):
        start = end = math.nan
    if not 0 <= start < end <= _MAX_TIME:
        raise ValueError("from and to are seconds since 1970, from before to")
    return Window(start, end)


class TimeoutProtocol(H11Protocol):
    """Closes connections beyond `_MAX_CONNECTIONS`, and those whose request does not arrive in
    time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _MAX_CONNECTIONS:
            transport.abort()
        else:
            self.loop.call_later(PATIENCE_S, self._look)

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self.loop.call_later(PATIENCE_S, self._look)


class PortThread:
    """Serves one port from a daemon thread."""

    def __init__(self, site: Site, settings: HttpSettings) -> None:
        """Raises OSError if the port cannot be opened."""
        assert settings.port is not None
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listening = socket.create_server((settings.host, settings.port), family=family)
        self.port: int = listening.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(
                site.app(),
                http=TimeoutProtocol,
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                log_level="critical",
                access_log=False,
                timeout_keep_alive=5,
                server_header=False,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([listening],), name="http port", daemon=True
        )
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Take no further requests; does not wait for those in progress."""
        self._server.should_exit = self._server.force_exit = True
