"""control.sock: `miner-guard ctl` and `status` send one line of JSON and get one back."""

from __future__ import annotations

import json
import os
import queue
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from miner_guard import __version__, state_dir
from miner_guard.state_dir import StateDir
from miner_guard.system.descriptors import address

_MAX_SIZE = 65536
_PATIENCE_S = 5.0
"""How long a client may take for its request, and the supervisor's thread for the answer."""

Answer = Mapping[str, Any]


class NotRunning(Exception):
    """No guard is listening on this state directory's control.sock."""


class ControlSocket(socketserver.ThreadingUnixStreamServer):
    """The supervisor's side, with a thread per client. The constructor raises OSError if it can't
    create the socket."""

    daemon_threads = True
    request_queue_size = 16

    def __init__(
        self,
        state: StateDir,
        soon: Callable[[Callable[[], None]], None],
        handle: Callable[[Mapping[str, Any]], Answer],
    ) -> None:
        """`soon` runs a call on the supervisor's thread, where `handle` answers requests."""
        self._state, self._soon, self._handle = state, soon, handle
        # A socket that is already there belongs to a dead guard, because this guard holds the lock.
        state.control.unlink(missing_ok=True)
        with address(state.control) as name:
            super().__init__(name, _Client)
        os.chmod(state.control, 0o600)
        threading.Thread(
            target=self.serve_forever, args=(3600.0,), name="control", daemon=True
        ).start()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a client. Raises OSError, after a pause, if no descriptor is free."""
        try:
            client: tuple[socket.socket, Any] = super().get_request()
        except OSError:
            time.sleep(1.0)
            raise
        return client

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client has disconnected or sent nothing; its request was executed anyway."""

    def answer(self, line: bytes) -> Answer:
        """Answer one request."""
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            return {"error": "not JSON"}
        if not isinstance(request, dict):
            return {"error": "not a JSON object"}
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._soon(lambda: answers.put(self._handle(request)))
        try:
            return answers.get(timeout=_PATIENCE_S)
        except queue.Empty:
            return {"error": "the guard is not responding"}

    def close(self) -> None:
        """Stop listening, and remove the socket."""
        self.server_close()
        state_dir.remove(self._state.control)


class _Client(socketserver.StreamRequestHandler):
    timeout = _PATIENCE_S
    server: ControlSocket

    def handle(self) -> None:
        answer = self.server.answer(self.rfile.readline(_MAX_SIZE))
        text = json.dumps({"version": __version__, **answer}, default=str)
        self.wfile.write(text.encode() + b"\n")


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
        line = client.makefile("rb").readline()
    if not line.endswith(b"\n"):
        raise NotRunning(f"the guard in {state.root} closed the connection; it is exiting")
    answer: Answer = json.loads(line)
    return answer
