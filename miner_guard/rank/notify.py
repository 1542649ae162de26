"""Sends datagrams that wake the supervisor; the data itself is in the flight record. A datagram
that cannot be sent immediately is dropped."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miner_guard.flight_recorder.records import json_default
from miner_guard.system.sockets import address

_NOBODY = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR})


def notification(rank: int) -> bytes:
    """The datagram that tells the supervisor to read the rank's flight record."""
    return b'{"bell": %d}' % rank


class Notifier:
    """Sends to one socket. `send` never blocks and never raises."""

    def __init__(self, path: Path | None) -> None:
        self.alone = path is None
        """Whether no supervisor is listening: there is no socket, or the last datagram found no
        listener."""

        self.dropped = 0
        """Number of undelivered datagrams: no process is listening, or the supervisor is too
        slow."""

        self._path = path
        self._socket: socket.socket | None = None
        if path is None:
            return
        with contextlib.suppress(OSError):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def notify(self, rank: int) -> bool:
        """Tell the supervisor to read the rank's flight record."""
        return self.send(notification(rank))

    def event(self, document: Mapping[str, Any]) -> bool:
        """Send a finding that may be lost."""
        return self.send(json.dumps(document, default=json_default).encode())

    def send(self, payload: bytes) -> bool:
        """Send one datagram. False if it was dropped."""
        if self._socket is None or self._path is None:
            self.alone = True
            self.dropped += 1
            return False
        try:
            with address(self._path) as name:
                self._socket.sendto(payload, socket.MSG_DONTWAIT, name)
        except OSError as error:
            # A supervisor that is stuck (EAGAIN) still exists, and will read the flight record
            # later.
            self.alone = error.errno in _NOBODY
            self.dropped += 1
            return False
        self.alone = False
        return True

    def answer(self, path: Path, work: Callable[[], None]) -> None:
        """Also receive at `path`: a thread waits for datagrams and runs `work` for each of them.
        Does nothing without a socket. Raises OSError."""
        receiver = self._socket
        if receiver is None:
            return
        path.unlink(missing_ok=True)
        with address(path) as name:
            receiver.bind(name)
        os.chmod(path, 0o600)

        def receive() -> None:
            while receiver.recv(16):
                work()

        threading.Thread(target=receive, name="miner-guard-requests", daemon=True).start()

    def close(self) -> None:
        """Close the socket; later datagrams are dropped."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self.alone = True
