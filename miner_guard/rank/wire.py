"""The rank's end of the wire: an abstract Unix stream to the guard.

The rank hands over the descriptor of its record with its first message (SCM_RIGHTS), so no path, no
pid and no disk stands between rank and guard, and the record of a rank that dies at once survives
it. Then it sends a newline whenever there is something new in the record. The guard sees from EOF
that the rank is gone; what it sends asks the rank for its last collectives.

An abstract name belongs to a network namespace. A rank in another one reaches the same guard
through a socket in the state directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miner_guard.system.descriptors import address

WIRE = "_MINER_GUARD_WIRE"
"""Environment variable: the abstract name and the token, separated by a space."""

_RETRY_S = 1.0
_UCRED = struct.Struct("iII")
"""pid, uid, gid; see unix(7)."""


def peer(connection: socket.socket) -> tuple[int, int]:
    """The pid and uid of the process at the other end; the pid is 0 if it is in a pid namespace
    that this process can't see. Raises OSError."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    return pid, uid


class Wire:
    """A connection to the guard. `ring` never blocks and never raises."""

    def __init__(
        self, name_and_token: str, path: Path | None, hello: Mapping[str, Any], memory: int
    ) -> None:
        """`path`: the socket to use if the abstract name leads nowhere. `memory`: the descriptor of
        the record."""
        self._socket: socket.socket | None = None
        name, _, token = name_and_token.partition(" ")
        self._addresses: tuple[str | Path, ...] = (f"\0{name}", *([path] if path else []))
        self._hello = json.dumps({"token": token, **hello}).encode() + b"\n"
        self._memory = memory
        self._answer: Callable[[], None] | None = None
        self._tried_at = -_RETRY_S
        self._connect()

    @property
    def alone(self) -> bool:
        """Whether no guard is listening."""
        return self._socket is None

    def ring(self) -> None:
        """Tell the guard to read the record. Connects first if no guard was listening."""
        if self._socket is None and time.monotonic() - self._tried_at >= _RETRY_S:
            self._connect()
        if self._socket is None:
            return
        try:
            self._socket.send(b"\n", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            # A guard that is stuck still exists, and will read the record later.
            return
        except OSError:
            self._hang_up()

    def _connect(self) -> None:
        self._tried_at = time.monotonic()
        for each in self._addresses:
            with contextlib.suppress(OSError):
                self._socket = self._connected(each)
                break
        if self._socket is not None and self._answer is not None:
            self.serve(self._answer)

    def _connected(self, where: str | Path) -> socket.socket:
        """Connect and introduce this rank. Raises OSError, including for a listener of another
        user."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # If the guard's queue is full, fail at once and try again later.
            connection.setblocking(False)
            named = contextlib.nullcontext(where) if isinstance(where, str) else address(where)
            with named as name:
                connection.connect(name)
            if peer(connection)[1] not in (os.geteuid(), 0):
                raise PermissionError("another user listens")
            flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
            socket.send_fds(connection, [self._hello], [self._memory], flags)
            connection.setblocking(True)
        except OSError:
            connection.close()
            raise
        return connection

    def serve(self, answer: Callable[[], None]) -> None:
        """Run `answer` in a thread whenever the guard asks."""
        self._answer, connection = answer, self._socket
        if connection is None:
            return

        def receive() -> None:
            with contextlib.suppress(OSError):
                while connection.recv(16):
                    answer()

        threading.Thread(target=receive, name="miner-guard-requests", daemon=True).start()

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Close the connection for good, as in a forked child."""
        self._hang_up()
        self._addresses = ()

    __del__ = close
