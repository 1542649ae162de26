"""The keeper's end of the socket to the guard.

Each message is a line of JSON; `{"output": N}` is followed by N bytes of the miner's output. What
the guard has not read waits here, so the keeper never waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

KEEPER_FD = "_MINER_GUARD_KEEPER_FD"
"""Environment variable that tells the guard the descriptor of its socket."""

KEPT = ("run", "demo")
"""The commands that run a miner, so that they need a keeper."""

MAX_OUTPUT_BYTES = 8 * 1024 * 1024
"""Output that waits for the guard. Beyond that it misses the oldest."""


def message(name: str, content: Any) -> bytes:
    """Encode one message."""
    return json.dumps({name: content}).encode() + b"\n"


_MAX_DESCRIPTORS = 16


class Held(NamedTuple):
    """Descriptors that a guard gave the keeper to hold for the next guard."""

    fds: tuple[int, ...]
    note: Any


class Link:
    """Messages to and from successive guards. `output` may be called from any thread."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.held: dict[str, Held] = {}
        self._arrived: deque[int] = deque()
        """Descriptors that came with messages that have not been read yet, oldest first."""

        self.unchecked = 0
        """Bytes of output that no guard has read."""

        self._urgent: deque[bytes] = deque()
        self._ordered: deque[tuple[bytes, int]] = deque()
        """Encoded messages with the number of bytes of output in them."""

        self._waiting = 0
        self._partial = memoryview(b"")
        self._read = b""
        self._mutex = threading.Lock()

    def open(self) -> socket.socket:
        """Create a socket pair for a new guard; returns the guard's end. Raises OSError."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.socket = ours
        return theirs

    def close(self) -> None:
        """Close the socket of a guard that is gone. Its messages are void; output waits for the
        next guard."""
        if self.socket is not None:
            self.socket.close()
        self.socket, self._partial, self._read = None, memoryview(b""), b""
        while self._arrived:
            os.close(self._arrived.popleft())
        self._urgent.clear()
        with self._mutex:
            self._ordered = deque(each for each in self._ordered if each[1])

    def tell(self, name: str, content: Any) -> None:
        """Send a message ahead of all waiting output."""
        self._urgent.append(message(name, content))

    def tell_in_order(self, name: str, content: Any) -> None:
        """Send a message after all output so far."""
        with self._mutex:
            self._ordered.append((message(name, content), 0))

    def output(self, data: bytes) -> None:
        """Send a copy of the miner's output."""
        with self._mutex:
            self._ordered.append((message("output", len(data)) + data, len(data)))
            self._waiting += len(data)
            while self._waiting > MAX_OUTPUT_BYTES:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        held: list[tuple[bytes, int]] = []
        while not (oldest := self._ordered.popleft())[1]:
            held.append(oldest)
        self._waiting -= oldest[1]
        self.unchecked += oldest[1]
        # The monitors must not take the two sides of a gap for one line.
        gap = message("output", 1) + b"\n"
        if not held or held[-1] != (gap, 0):
            held.append((gap, 0))
        self._ordered.extendleft(reversed(held))

    @property
    def pending(self) -> bool:
        """Whether anything waits to be sent."""
        return bool(self._partial or self._urgent or self._ordered)

    def send(self) -> None:
        """Send as much as the socket takes."""
        if self.socket is None:
            return
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while True:
                if not self._partial and not self._next():
                    return
                self._partial = self._partial[self.socket.send(self._partial) :]

    def _next(self) -> bool:
        if self._urgent:
            self._partial = memoryview(self._urgent.popleft())
            return True
        with self._mutex:
            if not self._ordered:
                return False
            data, size = self._ordered.popleft()
            self._waiting -= size
        self._partial = memoryview(data)
        return True

    def receive(self) -> Iterator[Mapping[str, Any]]:
        """The messages that have arrived. Raises EOFError if the guard has closed its end."""
        assert self.socket is not None
        data = b""
        with contextlib.suppress(ConnectionResetError):
            try:
                data = self._receive(self.socket)
            except BlockingIOError:
                return
        if not data:
            raise EOFError
        *lines, self._read = (self._read + data).split(b"\n")
        for line in lines:
            yield json.loads(line)

    def _receive(self, from_guard: socket.socket) -> bytes:
        data, fds, _, _ = socket.recv_fds(
            from_guard, 1 << 18, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        self._arrived.extend(fds)
        return data

    def hold(self, name: str, count: int, note: Any) -> None:
        """Hold the next `count` descriptors that the guard sent, in place of those that `name`
        named before."""
        self.drop(name)
        fds = tuple(self._arrived.popleft() for _ in range(min(count, len(self._arrived))))
        self.held[name] = Held(fds, note)

    def drop(self, name: str) -> None:
        """Close the descriptors that are held as `name`."""
        for fd in self.held.pop(name, Held((), None)).fds:
            os.close(fd)
