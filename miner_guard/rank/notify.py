"""Sends datagrams that wake the supervisor; the data itself is in the flight record. A datagram
that cannot be sent immediately is dropped."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miner_guard.flight_recorder.records import json_default
from miner_guard.system.sockets import address

_NOBODY = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR})


class Notifier:
    """Sends to one socket. `send` never blocks and never raises."""

    def __init__(self, path: Path | None) -> None:
        self.alone = path is None
        """Whether no supervisor listens: there is no socket, or the last datagram found no
        listener."""

        self.dropped = 0
        """Number of datagrams that did not arrive, because no one listens or the supervisor is too
        slow."""

        self._socket: socket.socket | None = None
        self._held = contextlib.ExitStack()
        if path is None:
            return
        try:
            self._address = self._held.enter_context(address(path))
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
        except OSError:
            self.close()

    def notify(self, rank: int) -> bool:
        """Tell the supervisor to read the rank's flight record."""
        return self.send(b'{"bell": %d}' % rank)

    def event(self, document: Mapping[str, Any]) -> bool:
        """Send a finding that may be lost."""
        return self.send(json.dumps(document, default=json_default).encode())

    def send(self, payload: bytes) -> bool:
        """Send one datagram. False if it was dropped."""
        if self._socket is None:
            self.alone = True
            self.dropped += 1
            return False
        try:
            self._socket.sendto(payload, self._address)
        except OSError as error:
            # A supervisor that is stuck (EAGAIN) is still there, and will read the flight record.
            self.alone = error.errno in _NOBODY
            self.dropped += 1
            return False
        self.alone = False
        return True

    def close(self) -> None:
        """Close the socket; later datagrams are dropped."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._held.close()
        self.alone = True
