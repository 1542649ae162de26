"""Connects the ranks on one node to their leader: one datagram in each direction per question."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from miner_guard.system.sockets import address

_MAX_DATAGRAM = 16384
_RETRY_S = 0.01
_LOOK_S = 0.5
"""Interval at which a waiting follower checks the store for a sign that its leader has given up."""

_NOT_THERE = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR})


@dataclass(frozen=True)
class Ask:
    """One rank's question, as received by its leader."""

    FORM: ClassVar[struct.Struct] = struct.Struct("<QIdBB")

    number: int
    """1-based sequence number of the question."""

    mark: int
    """Hash of the question's text, which shows whether all ranks ask the same question."""

    asked: float
    """Monotonic time in seconds at which the rank asked; all ranks on a node share this clock."""

    is_root: bool
    """Whether rank 0 sent it; rank 0 provides the answer."""

    answer: bytes | None

    def pack(self) -> bytes:
        """Encode the question as a datagram."""
        form = (self.number, self.mark, self.asked, self.is_root, self.answer is not None)
        return self.FORM.pack(*form) + (self.answer or b"")

    @classmethod
    def unpack(cls, datagram: bytes) -> Ask:
        """Parse the question in a datagram. Raises struct.error if the datagram is too short."""
        number, mark, asked, is_root, answered = cls.FORM.unpack_from(datagram)
        rest = datagram[cls.FORM.size :]
        return cls(number, mark, asked, bool(is_root), rest if answered else None)


class NodeLeader:
    """Collects the questions from the ranks on its node. Without a path, this rank is alone on
    its node."""

    def __init__(self, path: Path | None) -> None:
        """Raises OSError."""
        self._path = path
        self._socket: socket.socket | None = None
        self._early: dict[int, list[tuple[Ask, str | bytes]]] = {}
        """Questions that other ranks sent before this rank asked them, by number."""

        self._asked: list[tuple[int, str | bytes]] = []
        if path is None:
            return
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with address(path) as name:
            self._socket.bind(name)
        os.chmod(path, 0o600)

    def collect(self, own: Ask, size: int, timeout_s: float) -> list[Ask]:
        """Wait for the questions of the node's `size` ranks, and return them with this rank's own.
        Returns fewer if the earliest question has waited `timeout_s`."""
        heard = self._early.pop(own.number, [])
        asks = [own, *(ask for ask, _ in heard)]
        self._asked = [(ask.number, name) for ask, name in heard]
        while len(asks) < size and self._socket is not None:
            left = min(ask.asked for ask in asks) + timeout_s - time.monotonic()
            if left <= 0:
                break
            self._socket.settimeout(left)
            try:
                datagram, name = self._socket.recvfrom(_MAX_DATAGRAM)
                ask = Ask.unpack(datagram)
            except (TimeoutError, struct.error):
                continue
            if ask.number == own.number:
                asks.append(ask)
                self._asked.append((ask.number, name))
            elif ask.number > own.number:
                self._early.setdefault(ask.number, []).append((ask, name))
        return asks

    def answer(self, outcome: str, payload: bytes) -> None:
        """Reply to the ranks that asked. Does not wait for one that has exited."""
        for number, name in self._asked:
            with contextlib.suppress(OSError):
                assert self._socket is not None
                self._socket.settimeout(_LOOK_S)
                self._socket.sendto(b"%d %s\n%s" % (number, outcome.encode(), payload), name)
        self._asked = []

    def close(self) -> None:
        """Close the socket. The kernel refuses datagrams from ranks that ask later."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class NodeFollower:
    """Asks its node's leader."""

    def __init__(self, path: Path | None) -> None:
        """Raises OSError."""
        self._path = path
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # Let the kernel pick an address, so that no socket file is left behind.
        self._socket.bind("")

    def ask(self, own: Ask, deadline: float, gave_up: Callable[[], bool]) -> tuple[str, bytes]:
        """Ask the leader; return the outcome and the payload. The outcome is `late` if no reply
        comes by `deadline`, or if the leader `gave_up` earlier. Raises OSError."""
        if self._socket is None or self._path is None:
            return "late", b"this rank has given up"
        sent = self._send(self._socket, own.pack(), deadline, gave_up)
        while sent and (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(min(left, _LOOK_S))
            try:
                head, _, payload = self._socket.recv(_MAX_DATAGRAM).partition(b"\n")
            except TimeoutError:
                if gave_up():
                    break
                continue
            number, _, outcome = head.decode().partition(" ")
            if number == str(own.number):
                return outcome, payload
        return "late", b""

    def _send(
        self, own: socket.socket, datagram: bytes, deadline: float, gave_up: Callable[[], bool]
    ) -> bool:
        assert self._path is not None
        while (left := deadline - time.monotonic()) > 0:
            try:
                own.settimeout(left)
                with address(self._path) as name:
                    own.sendto(datagram, name)
                return True
            except OSError as error:
                if isinstance(error, TimeoutError) or error.errno not in _NOT_THERE:
                    raise
            # The leader has not started yet, or has given up.
            if gave_up():
                return False
            time.sleep(_RETRY_S)
        return False

    def close(self) -> None:
        """Release the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


Channel = NodeLeader | NodeFollower
