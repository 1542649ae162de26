"""The keeper's end of the socket to the guard.

Each packet is one message: a JSON object with one name, or `OUTPUT` followed by a piece of the
miner's output. What the guard has not read waits here, so the keeper never waits for it.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

KEEPER_FD = "_MINER_GUARD_KEEPER_FD"
"""Environment variable that tells the guard the descriptor of its socket."""

MINER_COMMANDS = ("run", "demo")
"""The commands that run a miner and therefore need a keeper."""

OUTPUT = b"\0"
"""First byte of a packet with output."""

MAX_OUTPUT_BYTES = 8 * 1024 * 1024
"""Maximum output that waits for the guard; beyond that, the oldest is dropped."""

MAX_PACKET_BYTES = 1 << 18
_BUFFER_BYTES = 1 << 20
_MAX_DESCRIPTORS = 16
_GAP = OUTPUT + b"\n"
"""Stands for missing output: the monitors must not take the two sides of a gap for one line."""


def message(name: str, content: Any) -> bytes:
    """Encode one message."""
    return json.dumps({name: content}).encode()


class Held(NamedTuple):
    """Descriptors that a guard gave the keeper to hold for the next guard."""

    fds: tuple[int, ...]
    note: Any


class Link:
    """Messages to and from successive guards. `output` may be called from any thread."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.held: dict[str, Held] = {}
        self._arrived: list[int] = []
        """Descriptors that came with the latest message."""

        self.unchecked = 0
        """Bytes of output that no guard has read."""

        self._urgent: deque[bytes] = deque()
        self._ordered: deque[bytes] = deque()
        self.waiting = 0
        """Bytes of output in `_ordered`."""

        self._mutex = threading.Lock()

    def open(self) -> socket.socket:
        """Create a socket pair for a new guard; returns the guard's end. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        ours.setblocking(False)
        self.socket = ours
        return theirs

    def close(self) -> None:
        """Close the socket of a guard that is gone. Its messages are void; output waits for the
        next guard."""
        if self.socket is not None:
            self.socket.close()
        self.socket = None
        self._urgent.clear()
        with self._mutex:
            self._ordered = deque(each for each in self._ordered if each[:1] == OUTPUT)

    def tell(self, name: str, content: Any) -> None:
        """Send a message ahead of all waiting output."""
        self._urgent.append(message(name, content))

    def tell_in_order(self, name: str, content: Any) -> None:
        """Send a message after all output so far."""
        with self._mutex:
            self._ordered.append(message(name, content))

    def output(self, data: bytes) -> None:
        """Send a copy of the miner's output."""
        with self._mutex:
            self._ordered.append(OUTPUT + data)
            self.waiting += len(data)
            if self.waiting > MAX_OUTPUT_BYTES:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drop output until half of the room is free again, but keep the messages between."""
        messages: list[bytes] = []
        while self.waiting > MAX_OUTPUT_BYTES // 2:
            oldest = self._ordered.popleft()
            if oldest[:1] == OUTPUT:
                self.waiting -= len(oldest) - 1
                self.unchecked += len(oldest) - 1
            else:
                messages.append(oldest)
        self.waiting += 1
        self._ordered.extendleft([_GAP, *reversed(messages)])

    @property
    def pending(self) -> bool:
        """Whether anything waits to be sent."""
        return bool(self._urgent or self._ordered)

    def send(self) -> None:
        """Send as much as the socket takes."""
        while self._urgent and self._sent(self._urgent[0]):
            self._urgent.popleft()
        while self._ordered and not self._urgent:
            with self._mutex:
                data = self._ordered[0]
                if not self._sent(data):
                    return
                self._ordered.popleft()
                self.waiting -= len(data) - 1 if data[:1] == OUTPUT else 0

    def _sent(self, data: bytes) -> bool:
        """Whether a packet was sent; True also for one that is too long for any socket."""
        if self.socket is None:
            return False
        try:
            self.socket.send(data)
        except OSError as error:
            return error.errno == errno.EMSGSIZE
        return True

    def receive(self) -> Iterator[Mapping[str, Any]]:
        """The messages that have arrived. Raises EOFError if the guard has closed its end."""
        while self.socket is not None:
            try:
                data, self._arrived, _, _ = socket.recv_fds(
                    self.socket, MAX_PACKET_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                raise EOFError from None
            if not data:
                raise EOFError
            yield json.loads(data)

    def hold(self, name: str, note: Any) -> None:
        """Hold the descriptors that came with the latest message, in place of those that `name`
        named before."""
        self.drop(name)
        self.held[name] = Held(tuple(self._arrived), note)

    def drop(self, name: str) -> None:
        """Close the descriptors that are held as `name`."""
        for fd in self.held.pop(name, Held((), None)).fds:
            os.close(fd)
