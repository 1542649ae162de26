"""S3 servers for tests: in-process moto behind a layer of faults, and `rclone serve s3` as a
second, independent one."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from email.utils import formatdate, parsedate_to_datetime
from pathlib import Path
from typing import Any

import pytest

from miner_guard.config import RepoSettings
from tests.support import requires
from tests.support.launcher import free_port

Environ = dict[str, Any]
Application = Callable[[Environ, Callable[..., Any]], Iterable[bytes]]

KEYS = {"AWS_ACCESS_KEY_ID": "guardtest", "AWS_SECRET_ACCESS_KEY": "guard-test-secret"}


class Faults:
    """Faults between client and server. Set the attributes at any time; thread-safe enough for
    tests."""

    refuse: tuple[int, str] | None = None
    """If set, answer every request with this (status, code)."""

    half_close = False
    """Whether responses break off halfway through their body."""

    shift_s = 0.0
    """Seconds by which the server's clock is ahead of this host's."""


class FaultLayer:
    """WSGI middleware."""

    def __init__(self, app: Application, faults: Faults) -> None:
        self._app = app
        self.faults = faults

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        faults = self.faults
        if faults.refuse is not None:
            return _refused(environ, start_response, *faults.refuse)

        def answer(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            return start_response(status, _shifted(headers, faults.shift_s), *more)

        body = b"".join(self._app(environ, answer))
        return [body[: len(body) // 2]] if faults.half_close else [body]


def _refused(
    environ: Environ, start_response: Callable[..., Any], status: int, code: str
) -> Iterable[bytes]:
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    body = (
        f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as the test wants "
        "it</Message></Error>"
    ).encode()
    start_response(
        f"{status} {code}",
        [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))],
    )
    return [body]


def _shifted(headers: list[tuple[str, str]], seconds: float) -> list[tuple[str, str]]:
    # The handler sets the header Date; this is the object's own time.
    return [
        (k, _moved(v, seconds) if k.lower() == "last-modified" else v)
        for k, v in headers
        if k.lower() != "date"
    ]


def _moved(date: str, seconds: float) -> str:
    return formatdate(parsedate_to_datetime(date).timestamp() + seconds, usegmt=True)


@contextlib.contextmanager
def moto() -> Iterator[tuple[str, Faults]]:
    """A server in a thread of this process; yields its endpoint and its faults."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        # The development server would close each connection, and log each request.
        protocol_version = "HTTP/1.1"

        def log(self, *_: Any) -> None:
            return

        def date_time_string(self, timestamp: float | None = None) -> str:
            return formatdate((timestamp or time.time()) + faults.shift_s, usegmt=True)

    faults = Faults()
    layer = FaultLayer(DomainDispatcherApplication(create_backend_app), faults)
    server = make_server("127.0.0.1", 0, layer, threaded=True, request_handler=Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        # moto keeps its buckets in this process, so those of the previous test still exist.
        urllib.request.urlopen(
            urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST"), timeout=10
        ).close()
        yield endpoint, faults
    finally:
        server.shutdown()
        thread.join()
        # Close only the socket: `server_close` would wait for threads that hold a client's idle
        # connection.
        server.socket.close()


@contextlib.contextmanager
def bucket(name: str) -> Iterator[tuple[RepoSettings, Faults]]:
    """`moto` with an empty bucket; yields the settings of a repo in that bucket."""
    with moto() as (endpoint, faults):
        settings = RepoSettings(kind="s3", bucket=name, endpoint=endpoint)
        client(settings).create_bucket(Bucket=name)
        yield settings, faults


def client(settings: RepoSettings) -> Any:
    """boto3's own client, with its own defaults."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=settings.endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
    )


def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put `KEYS` where the repo looks for them. Skips the test if a library is missing."""
    for module in ("moto", "boto3"):
        requires.module(module)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@contextlib.contextmanager
def rclone(
    program: str, folder: Path, pair: tuple[str, ...] = tuple(KEYS.values())
) -> Iterator[str]:
    """`rclone serve s3` over a folder, with real authentication by a pair of keys; yields its
    endpoint."""
    port = free_port()
    keys = ",".join(pair)
    child = subprocess.Popen(
        [program, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", keys, str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.kill()
        child.wait()


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def _wait_for(port: int) -> None:
    for _ in range(400):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on port {port}")
