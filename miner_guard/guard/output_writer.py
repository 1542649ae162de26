"""Writes relayed output without ever blocking the supervisor on a stalled reader.

A slow reader slows the miner down (backpressure). A reader that consumes nothing must not stop the
miner: the guard then buffers up to 64 MiB, and drops and counts only what exceeds that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

HIGH_WATER = 8 * 1024 * 1024
"""Stop reading from the miner when the backlog exceeds this and the reader is still making
progress. With a lower limit, the writer thread would take the GIL so often that the miner would
have to wait."""

LOW_WATER = HIGH_WATER // 2
LIMIT = 64 * 1024 * 1024
STUCK_S = 5.0
UNFINISHED_LINE_S = 1.0
"""How long a line from the guard waits for the miner to end its line."""

_BATCH = 16
_MAY_PASS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM})
"""Errors that may clear by themselves: the output goes to a file on a disk that is full, over quota
or temporarily unavailable."""


class OutputWriter:
    """Writes one output stream of the guard. Call `put` from the supervisor's thread; `print_line`
    may be called from any thread."""

    def __init__(self, fd: int, on_room: Callable[[], None]) -> None:
        """The writer's thread calls `on_room` when the backlog of a congested writer drops below
        `LOW_WATER`."""
        self._on_room = on_room
        self._write, self._poll_fd, self._direct = _writer(fd)
        self._mutex = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._held: list[bytes] = []
        self._held_since = 0.0
        self._size = 0
        self._at_line_start = True
        self._progress = time.monotonic()
        self._gone = False
        self._closing = False
        self._busy = False
        self._room_wanted = False
        self.dropped = 0
        """Bytes that were dropped."""

        threading.Thread(target=self._run, name=f"outlet-{fd}", daemon=True).start()

    @property
    def stuck(self) -> bool:
        """Whether output is waiting and the reader has consumed nothing for `STUCK_S`."""
        return self._size > 0 and time.monotonic() - self._progress > STUCK_S

    @property
    def congested(self) -> bool:
        """Whether the miner should wait: the reader is behind but is making progress. If so, the
        writer calls `on_room` once the reader has caught up."""
        # Set this before the comparison, because the writer's thread may catch up during it.
        self._room_wanted = True
        congested = self._size > HIGH_WATER and not self.stuck
        self._room_wanted = congested
        return congested

    @property
    def idle(self) -> bool:
        """Whether everything has been written and the writer holds no bytes."""
        with self._mutex:
            return not self._waiting and not self._busy

    def put(self, chunks: Sequence[bytes]) -> None:
        """Queue the miner's output, unchanged."""
        with self._mutex:
            for data in chunks:
                self._put(data)

    def _put(self, data: bytes) -> None:
        if self._held and (end := data.find(b"\n") + 1):
            self._add(data[:end])
            self._release()
            data = data[end:]
        if data:
            self._add(data)
            self._at_line_start = data.endswith(b"\n")

    def print_line(self, line: str) -> None:
        """Queue whole lines from the guard. If the miner has printed part of a line, they wait
        briefly until that line ends."""
        data = line.encode("utf-8", "replace")
        with self._mutex:
            if self._at_line_start and not self._held:
                self._add(data)
                return
            if not self._held:
                self._held_since = time.monotonic()
            self._held.append(data)

    def tick(self) -> None:
        """Release the guard's lines if the miner does not end its line in time."""
        with self._mutex:
            if self._held and time.monotonic() - self._held_since >= UNFINISHED_LINE_S:
                self._break_line()

    def _break_line(self) -> None:
        self._add(b"\n")
        self._release()
        self._at_line_start = True

    def _release(self) -> None:
        self._add(b"".join(self._held))
        self._held.clear()

    def _add(self, data: bytes) -> None:
        if self._gone:
            self.dropped += len(data)
            return
        if self._direct and not self._waiting and not self._busy:
            try:
                written = self._write([data])
            except BlockingIOError:
                written = 0
            except OSError:
                self._gone = True
                self.dropped += len(data)
                return
            if written:
                self._progress = time.monotonic()
            data = data[written:]
            if not data:
                return
        if self._size + len(data) > LIMIT and self.stuck:
            self.dropped += len(data)
            return
        if not self._size:
            self._progress = time.monotonic()
        self._waiting.append(data)
        self._size += len(data)
        self._mutex.notify()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._poll_fd, select.POLLOUT)
        while True:
            with self._mutex:
                while not self._waiting:
                    if self._closing:
                        return
                    self._mutex.wait()
                batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
                self._busy = True
            try:
                self._deliver(batch, poller)
            except OSError as error:
                # A full disk may regain space; after EPIPE the reader is gone for good.
                self._lose(for_good=error.errno not in _MAY_PASS)
            with self._mutex:
                self._busy = False
                self._mutex.notify_all()
            if self._room_wanted and self._size <= LOW_WATER:
                self._room_wanted = False
                self._on_room()

    def _deliver(self, batch: list[bytes], poller: select.poll) -> None:
        while batch:
            try:
                written = self._write(batch)
            except BlockingIOError:
                # Even a blocking descriptor may refuse a write: another program may have set a
                # shared terminal to O_NONBLOCK. Retrying immediately would use a whole core.
                poller.poll(1000)
                continue
            self._progress = time.monotonic()
            with self._mutex:
                self._size -= written
            while batch and written >= len(batch[0]):
                written -= len(batch.pop(0))
            if written:
                batch[0] = batch[0][written:]

    def _lose(self, *, for_good: bool) -> None:
        with self._mutex:
            self._gone = for_good
            self.dropped += self._size
            self._size = 0
            self._waiting.clear()
        self._on_room()

    def finish(self, seconds: float) -> None:
        """Flush the remaining output, for at most `seconds`; anything left then counts as
        dropped."""
        with self._mutex:
            if self._held:
                if not self._at_line_start:
                    self._break_line()
                else:
                    self._release()
            self._closing = True
            self._mutex.notify_all()
            deadline = time.monotonic() + seconds
            while (self._waiting or self._busy) and (left := deadline - time.monotonic()) > 0:
                self._mutex.wait(left)
            self.dropped += self._size
            self._size = 0


_Write = Callable[[list[bytes]], int]


def _writer(fd: int) -> tuple[_Write, int, bool]:
    """Return the function that writes to `fd`, the descriptor to poll, and whether the function
    never blocks.

    The flags of `fd` stay unchanged, because other processes share them.
    """
    kind = os.fstat(fd).st_mode
    if stat.S_ISSOCK(kind):
        # pm2 passes sockets, which can't be reopened through /proc/self/fd.
        peer = socket.socket(fileno=os.dup(fd))
        return lambda batch: peer.sendmsg(batch, [], socket.MSG_DONTWAIT), peer.fileno(), True
    if stat.S_ISFIFO(kind):
        with contextlib.suppress(OSError):
            again = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            return lambda batch: os.writev(again, batch), again, True
    return lambda batch: os.writev(fd, batch), fd, False


def same_target(one: int, other: int) -> bool:
    """Return True if two descriptors have the same target. The miner's two streams then share one
    pipe, which keeps their lines in order."""
    a, b = os.fstat(one), os.fstat(other)
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
