"""The HTTP port: `python -m miner_guard.supervisor.http`, a process of its own beside the supervisor.

It reads status.json and guard.jsonl like anybody else, so nothing that is done to the port reaches the
miner or the guard. Its order is one line of JSON on stdin (never on the command line: it holds the token);
it answers one line, the port, and ends when stdin does.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import resource
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from miner_guard import __version__, statedir
from miner_guard.config import HangSettings
from miner_guard.health import metrics, progress

PATIENCE_S = 10.0
"""A client that has not sent a whole request by then is shown the door."""

_MOST_CONNECTIONS = 512
_PAGE_FOR_S = 5.0


@dataclass(frozen=True)
class Order:
    """What the port is to do."""

    state: str
    host: str
    port: int
    token: str | None = None
    hang: dict[str, Any] = field(default_factory=dict)


class Site:
    """The four addresses."""

    def __init__(self, order: Order) -> None:
        self._state = statedir.StateDir(Path(order.state))
        self._token = order.token
        self._hang = HangSettings(**order.hang)
        self._page: tuple[float, str] | None = None
        self._page_mutex = threading.Lock()

    def app(self) -> Starlette:
        routes = [
            Route("/", self.page),
            Route("/metrics", self.metrics),
            Route("/healthz", self.healthz),
            Route("/status", self.status),
        ]
        return Starlette(routes=routes)

    def _refused(self, request: Request) -> Response | None:
        if self._token is None:
            return None
        given = request.headers.get("authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return None
        return PlainTextResponse("a bearer token is needed\n", 401, {"WWW-Authenticate": "Bearer"})

    def _read(self) -> tuple[dict[str, Any] | None, float]:
        document = statedir.read_json(self._state.status)
        try:
            age = max(0.0, time.time() - self._state.status.stat().st_mtime)
        except OSError:
            age = float("inf")
        return (document if isinstance(document, dict) else None), age

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        if refusal := self._refused(request):
            return refusal
        status, age = self._read()
        if status is None:
            return PlainTextResponse("no status yet\n", 503)
        body = metrics.text(status, version=__version__, age_s=age)
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def healthz(self, request: Request) -> Response:
        """200 while the miner progresses, 503 with the reason otherwise. Needs no token: it tells nothing else."""
        status, age = self._read()
        trouble = progress.trouble(status, age, time.time(), self._hang)
        return PlainTextResponse(
            "progressing\n" if trouble is None else f"{trouble}\n", 200 if trouble is None else 503
        )

    async def status(self, request: Request) -> Response:
        """status.json."""
        if refusal := self._refused(request):
            return refusal
        status, _ = self._read()
        return JSONResponse(status) if status is not None else JSONResponse({"error": "no status yet"}, 503)

    async def page(self, request: Request) -> Response:
        """The report, as of now; it reloads itself."""
        if refusal := self._refused(request):
            return refusal
        return HTMLResponse(await run_in_threadpool(self._rendered))

    def _render(self) -> str:
        from miner_guard.health.report import render
        from uploads import ledger

        pushes = ledger.read(self._state.ledger, "uploads")
        return render(self._state, refresh_s=int(2 * _PAGE_FOR_S), pushes=pushes)

    def _rendered(self) -> str:
        with self._page_mutex:
            now = time.monotonic()
            if self._page is None or now - self._page[0] > _PAGE_FOR_S:
                self._page = (now, self._render())
            return self._page[1]


class Impatient(H11Protocol):
    """Closes connections whose request does not come: slow clients must not use up the descriptors."""

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
    """The child."""
    order = Order(**json.loads(sys.stdin.readline()))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MOST_CONNECTIONS if most == resource.RLIM_INFINITY else min(_MOST_CONNECTIONS, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    # Attacks are this process's burden alone: the miner's cores go first.
    os.nice(10)
    config = uvicorn.Config(
        Site(order).app(), host=order.host, port=order.port, http=Impatient, ws="none", lifespan="off", loop="asyncio",
        log_level="critical", access_log=False, timeout_keep_alive=5, backlog=128, server_header=False,
    )  # fmt: skip
    _Server(config).run()


if __name__ == "__main__":
    main()
