"""guard.sock: datagrams from the ranks. They say that there is something to read; they may be
lost."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from typing import Any

from miner_guard.eventlog.catalog import CATALOGUE, LEVELS, Finding, make_finding
from miner_guard.state_dir import StateDir
from miner_guard.system.sockets import address

_MAX_SIZE = 65536
_MAX_AT_ONCE = 256


class NotifySocket:
    """The receiving end. Making one raises OSError where the socket can't be made."""

    def __init__(
        self, state: StateDir, on_ring: Callable[[int], None], on_finding: Callable[[Finding], None]
    ) -> None:
        self._path = state.socket
        self._on_ring = on_ring
        self._on_finding = on_finding
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        # Whatever lies there under our name is from a guard that is gone: we hold the lock.
        self._path.unlink(missing_ok=True)
        with address(self._path) as name:
            self._socket.bind(name)
        os.chmod(self._path, 0o600)

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> None:
        """Handle what has arrived."""
        rung: set[int] = set()
        for _ in range(_MAX_AT_ONCE):
            try:
                data = self._socket.recv(_MAX_SIZE)
            except BlockingIOError:
                break
            self._understand(data, rung)
        for rank in sorted(rung):
            self._on_ring(rank)

    def _understand(self, data: bytes, rung: set[int]) -> None:
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            return
        if isinstance(document.get("bell"), int):
            rung.add(document["bell"])
        elif (finding := finding_of(document)) is not None:
            self._on_finding(finding)

    def close(self) -> None:
        self._socket.close()
        self._path.unlink(missing_ok=True)


def finding_of(document: dict[str, Any], rank: int | None = None) -> Finding | None:
    """The finding that a datagram or a journal entry holds; None where it is not one of the
    catalogue's."""
    event, fields = document.get("event"), document.get("fields")
    level = document.get("level")
    if not isinstance(event, str) or event not in CATALOGUE or not isinstance(fields, dict):
        return None
    if level is not None and (not isinstance(level, str) or level not in LEVELS):
        return None
    said = document.get("rank", rank)
    try:
        return make_finding(
            str(event), rank=said if isinstance(said, int) else None, level=level, **fields
        )
    except (TypeError, ValueError):
        return None
