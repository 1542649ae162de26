"""Datagrams to the supervisor: a bell, not the record. Non-blocking; dropped rather than waited for."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NOBODY = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR})
_LONGEST_PATH = 107
"""Bytes of a Unix socket's path on Linux, without the final NUL."""


class Bell:
    """Rings at one socket. `send` never blocks and never raises."""

    def __init__(self, path: Path | None) -> None:
        self.alone = path is None
        """Nobody listens: there is no socket, or the last datagram found nobody at its end."""

        self.dropped = 0
        """Datagrams that did not arrive: nobody listened, or the reader was too slow."""

        self._socket: socket.socket | None = None
        self._folder: int | None = None
        self._address = ""
        if path is None:
            return
        try:
            self._address = self._short(path)
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
        except OSError:
            self.close()

    def _short(self, path: Path) -> str:
        if len(os.fsencode(path)) <= _LONGEST_PATH:
            return str(path)
        # The kernel takes no longer path; the folder's descriptor gives a short one to the same place.
        self._folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._folder}/{path.name}"

    def ring(self, rank: int) -> bool:
        """Say that there is something to read in the rank's flight record."""
        return self.send(b'{"bell": %d}' % rank)

    def event(self, document: Mapping[str, Any]) -> bool:
        """Send a finding that may be lost."""
        return self.send(json.dumps(document, default=str).encode())

    def send(self, payload: bytes) -> bool:
        """Send one datagram. False where it was dropped."""
        if self._socket is None:
            self.alone = True
            self.dropped += 1
            return False
        try:
            self._socket.sendto(payload, self._address)
        except OSError as error:
            # A reader that is stuck (EAGAIN) is still a reader: it has the flight record.
            self.alone = error.errno in _NOBODY
            self.dropped += 1
            return False
        self.alone = False
        return True

    def close(self) -> None:
        """Let go of the socket; later datagrams are dropped."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None
        self.alone = True
