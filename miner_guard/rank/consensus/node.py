"""How the ranks of one node reach their leader: one datagram each way."""

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
"""How often a waiting follower checks the store for whether its leader has given up."""

_NOT_THERE = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR})


@dataclass(frozen=True)
class Ask:
    """One rank's question, as its leader receives it."""

    FORM: ClassVar[struct.Struct] = struct.Struct("<QIdBB")

    number: int
    """Sequence number of the question, from 1."""

    mark: int
    """Hash of the question's text: ranks that ask different questions have different marks."""

    asked: float
    """Monotonic seconds, shared by the ranks of a node."""

    is_root: bool
    """Sent by rank 0, which provides the answer."""

    answer: bytes | None

    def pack(self) -> bytes:
        """The datagram."""
        form = (self.number, self.mark, self.asked, self.is_root, self.answer is not None)
        return self.FORM.pack(*form) + (self.answer or b"")

    @classmethod
    def unpack(cls, datagram: bytes) -> Ask:
        """Parse the question in a datagram. Raises struct.error if there is none."""
        number, mark, asked, is_root, answered = cls.FORM.unpack_from(datagram)
        rest = datagram[cls.FORM.size :]
        return cls(number, mark, asked, bool(is_root), rest if answered else None)


class NodeLeader:
    """Collects the questions of its node's ranks. Without a path it is alone on the node."""

    def __init__(self, path: Path | None) -> None:
        """Raises OSError."""
        self._path = path
        self._socket: socket.socket | None = None
        self._early: dict[int, list[tuple[Ask, str | bytes]]] = {}
        """By number: questions that arrived before this rank asked them."""

        self._asked: list[tuple[int, str | bytes]] = []
        if path is None:
            return
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with address(path) as name:
            self._socket.bind(name)
        os.chmod(path, 0o600)

    def collect(self, own: Ask, size: int, timeout_s: float) -> list[Ask]:
        """The questions of the node's `size` ranks, including its own; fewer once the first of them
        has waited `timeout_s`."""
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
        """Close the socket; ranks that ask later are refused."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class NodeFollower:
    """Asks the leader of its node."""

    def __init__(self, path: Path | None) -> None:
        """Raises OSError."""
        self._path = path
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # The kernel picks an address, which leaves no file.
        self._socket.bind("")

    def ask(self, own: Ask, deadline: float, gave_up: Callable[[], bool]) -> tuple[str, bytes]:
        """The outcome and the payload; `late` if there is no reply by `deadline`, or if the leader
        `gave_up` earlier. Raises OSError."""
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
