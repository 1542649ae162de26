"""control.sock: `miner-guard ctl` and `status` send one line of JSON and get one back."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from miner_guard import __version__
from miner_guard.guard.loop import Loop
from miner_guard.state_dir import StateDir
from miner_guard.system.descriptors import address

_MAX_SIZE = 65536
_PATIENCE_S = 5.0
_PAUSE_S = 0.01

Answer = Mapping[str, Any]


class NotRunning(Exception):
    """No guard is listening on this state directory's control.sock."""


class ControlSocket:
    """The supervisor's side. The constructor raises OSError if it can't create the socket."""

    def __init__(
        self, state: StateDir, loop: Loop, handle: Callable[[Mapping[str, Any]], Answer]
    ) -> None:
        self._path = state.control
        self._loop = loop
        self._handle = handle
        self._clients: dict[int, tuple[socket.socket, bytes]] = {}
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        self._path.unlink(missing_ok=True)
        with address(self._path) as name:
            self._socket.bind(name)
        os.chmod(self._path, 0o600)
        self._socket.listen(16)
        loop.watch(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            client, _ = self._socket.accept()
        except OSError:
            # No descriptor is free (EMFILE). Ignore the socket for a while, because the pending
            # client would keep the loop spinning.
            self._loop.rest(self._socket.fileno())
            return
        client.setblocking(False)
        fd = client.fileno()
        self._clients[fd] = (client, b"")
        self._loop.watch(fd, lambda: self._readable(fd))
        # A silent client must not hold a descriptor forever.
        self._loop.after(_PATIENCE_S, lambda: self._drop(fd, client))

    def _readable(self, fd: int) -> None:
        client, received = self._clients[fd]
        try:
            data = client.recv(_MAX_SIZE)
        except OSError:
            data = b""
        received += data
        self._clients[fd] = (client, received)
        if b"\n" in received:
            self._loop.unwatch(fd)
            self._send(fd, client, self._answer(received.partition(b"\n")[0]))
        elif not data or len(received) > _MAX_SIZE:
            self._drop(fd, client)

    def _answer(self, line: bytes) -> bytes:
        try:
            request = json.loads(line)
            answer = (
                self._handle(request)
                if isinstance(request, dict)
                else {"error": "not a JSON object"}
            )
        except (ValueError, RecursionError):
            answer = {"error": "not JSON"}
        return json.dumps({"version": __version__, **answer}, default=str).encode() + b"\n"

    def _send(self, fd: int, client: socket.socket, data: bytes) -> None:
        """Send what the socket accepts now, and the rest later. A status with a long command line
        may be too long to send at once."""
        if self._clients.get(fd, (None,))[0] is not client:
            return
        try:
            data = data[client.send(data) :]
        except BlockingIOError:
            pass
        except OSError:
            # The client has disconnected; its request was executed anyway.
            data = b""
        if data:
            self._loop.after(_PAUSE_S, lambda: self._send(fd, client, data))
        else:
            self._drop(fd, client)

    def _drop(self, fd: int, client: socket.socket) -> None:
        if self._clients.get(fd, (None,))[0] is client:
            del self._clients[fd]
            self._loop.unwatch(fd)
            client.close()

    def close(self) -> None:
        for fd, (client, _) in list(self._clients.items()):
            self._drop(fd, client)
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()


def ask(state: StateDir, request: Mapping[str, Any], timeout_s: float = 5.0) -> Answer:
    """Send a request to the guard running in this state directory and return its reply. Raises
    NotRunning, or TimeoutError if the guard does not answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(timeout_s)
        try:
            with address(state.control) as name:
                client.connect(name)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
            raise NotRunning(f"no guard is running in {state.root}") from error
        client.sendall(json.dumps(request).encode() + b"\n")
        received = b""
        while b"\n" not in received:
            data = client.recv(_MAX_SIZE)
            if not data:
                raise NotRunning(f"the guard in {state.root} closed the connection; it is exiting")
            received += data
    answer: Answer = json.loads(received)
    return answer
