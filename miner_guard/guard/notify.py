"""guard.sock: the ranks announce new data by datagram. Datagrams can get lost."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable

from miner_guard.eventlog.catalog import Finding
from miner_guard.guard.loop import Loop
from miner_guard.state_dir import StateDir
from miner_guard.system.sockets import address

_MAX_SIZE = 65536
_MAX_AT_ONCE = 256


class NotifySocket:
    """The receiving end, read in the loop. The constructor raises OSError if it can't create the
    socket."""

    def __init__(
        self,
        state: StateDir,
        loop: Loop,
        on_notified: Callable[[int], None],
        on_finding: Callable[[Finding], None],
    ) -> None:
        self._path = state.socket
        self._loop = loop
        self._on_notified = on_notified
        self._on_finding = on_finding
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        # A socket that is already there belongs to a dead guard, because this guard holds the lock.
        self._path.unlink(missing_ok=True)
        with address(self._path) as name:
            self._socket.bind(name)
        os.chmod(self._path, 0o600)
        loop.watch(self._socket.fileno(), self._receive)

    def _receive(self) -> None:
        """Handle the pending datagrams."""
        notified: set[int] = set()
        for _ in range(_MAX_AT_ONCE):
            try:
                data = self._socket.recv(_MAX_SIZE)
            except BlockingIOError:
                break
            self._understand(data, notified)
        for rank in sorted(notified):
            self._on_notified(rank)

    def _understand(self, data: bytes, notified: set[int]) -> None:
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            return
        if isinstance(document.get("bell"), int):
            notified.add(document["bell"])
        elif (finding := Finding.from_json(document)) is not None:
            self._on_finding(finding)

    def close(self) -> None:
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()
