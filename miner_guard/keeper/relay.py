"""Passes the miner's output on unchanged, and gives the guard a copy.

One thread per output stream reads a pipe, writes what it read, and hands over the copy. A slow
reader slows the miner down, as a plain pipe would. A reader that consumes nothing must not stop the
miner: after `STUCK_S` the relay drops and counts what the reader does not take.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from selectors import EVENT_WRITE

from miner_guard.system.descriptors import WakePipe, ready

CHUNK = 65536
"""Bytes per copy, except for shorter pieces."""

STUCK_S = 5.0
UNFINISHED_LINE_S = 1.0
"""How long a line from the guard waits for the miner to end its line."""

_PIPE_SIZE = 1024 * 1024
_F_SETPIPE_SZ = 1031
_MAX_GUARD_LINES = 1000
_NAP_S = 0.002
"""Pause after a read of less than `CHUNK`: waking up for each small piece would cost both sides
more than reading it. During the pause the pipe absorbs up to 500 MB/s."""

_MAY_PASS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM})
"""Errors that may clear by themselves, as on a full disk. After any other, the reader is gone."""


@dataclass
class _Source:
    """The read end of a launch's pipe."""

    fd: int
    ended: bool = False
    """Only what the pipe holds now still counts: a surviving process could print forever."""


class _Stream:
    """One output stream of the guard. Its thread owns the sources; other threads only queue."""

    def __init__(self, fd: int, copy: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._send, self._poll_fd = _sender(fd)
        self._copy, self._on_end = copy, on_end
        self._wakeup = WakePipe()
        self.wake = self._wakeup.wake
        self.sources: deque[_Source] = deque()
        self._guard_lines: deque[bytes] = deque(maxlen=_MAX_GUARD_LINES)
        self._guard_lines_since = 0.0
        self._at_line_start = True
        self._unfinished = b""
        """The start of a line that has not been copied: the other stream's thread could
        put its own lines into the middle of it."""

        self._reader_gone = self._closing = False
        self.stuck = False
        """The reader has consumed nothing for `STUCK_S`."""

        self.dropped = 0
        self._buffer = bytearray(_PIPE_SIZE)
        self._thread = threading.Thread(target=self._run, name=f"relay-{fd}", daemon=True)
        self._thread.start()

    def print_line(self, line: str) -> None:
        if not self._guard_lines:
            self._guard_lines_since = time.monotonic()
        self._guard_lines.append(line.encode("utf-8", "replace"))
        self.wake()

    def finish(self, seconds: float) -> None:
        self._closing = True
        self.wake()
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._closing or self.sources or self._guard_lines:
            source = self.sources[0] if self.sources else None
            wait_s = UNFINISHED_LINE_S / 4 if self._guard_lines or self._unfinished else None
            if self._closing or (source is not None and source.ended):
                wait_s = 0.0
            fds = [self._wakeup.reading, *([] if source is None else [source.fd])]
            readable = ready(fds, wait_s)
            if self._wakeup.reading in readable:
                self._wakeup.clear()
            if source is not None:
                self._relay(source, readable=source.fd in readable)
            if not readable:
                self._copy_unfinished()
            self._print_guard_lines()

    def _relay(self, source: _Source, *, readable: bool) -> None:
        # Look at this once: what the pipe held when it was set is then still relayed.
        ended = source.ended
        remaining = _PIPE_SIZE if ended else 0
        size = self._read(source) if readable or ended else -1
        while 0 < size < remaining:
            remaining -= size
            size = self._read(source)
        if size == 0 or ended:
            self._copy_unfinished()
            os.close(source.fd)
            self.sources.popleft()
            self._on_end()
        elif 0 < size < CHUNK:
            time.sleep(_NAP_S)

    def _read(self, source: _Source) -> int:
        """Relay one piece; returns its size, 0 at the end of the pipe, -1 if the pipe is empty."""
        try:
            size = os.readv(source.fd, [self._buffer])
        except BlockingIOError:
            return -1
        view = memoryview(self._buffer)[:size]
        self._pass_on(view)
        data = self._unfinished + bytes(view)
        # A progress bar ends its lines with a carriage return.
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._unfinished = data[end:]
        for start in range(0, end, CHUNK):
            self._copy(data[start : min(start + CHUNK, end)])
        if len(self._unfinished) >= CHUNK:
            self._copy_unfinished()
        return size

    def _copy_unfinished(self) -> None:
        unfinished, self._unfinished = self._unfinished, b""
        for start in range(0, len(unfinished), CHUNK):
            self._copy(unfinished[start : start + CHUNK])

    def _pass_on(self, view: memoryview) -> None:
        if self._guard_lines and (end := self._buffer.find(b"\n", 0, len(view)) + 1):
            self._write(view[:end])
            self._at_line_start = True
            self._print_guard_lines()
            view = view[end:]
        if view:
            self._write(view)
            self._at_line_start = view[-1] == ord("\n")

    def _print_guard_lines(self) -> None:
        """Write the guard's lines, once the miner's line has ended or after a short wait."""
        if self._guard_lines and not self._at_line_start:
            waited_s = time.monotonic() - self._guard_lines_since
            if waited_s < UNFINISHED_LINE_S and not (self._closing and not self.sources):
                return
            self._write(memoryview(b"\n"))
            self._at_line_start = True
        while self._guard_lines:
            self._write(memoryview(self._guard_lines.popleft()))

    def _write(self, view: memoryview) -> None:
        while view and not self._reader_gone:
            try:
                view = view[self._send(view) :]
                self.stuck = False
            except BlockingIOError:
                if not ready([self._poll_fd], 0.0 if self.stuck else STUCK_S, EVENT_WRITE):
                    self.stuck = True
                    break
            except OSError as error:
                self._reader_gone = error.errno not in _MAY_PASS
                break
        self.dropped += len(view)


class Relay:
    """Relays the output of successive launches. Threads call `copy`, with the monitors' share of
    the output, and `wake`, when a pipe has been read to its end."""

    def __init__(self, copy: Callable[[bytes], None], wake: Callable[[], None]) -> None:
        out, err = sys.stdout.fileno(), sys.stderr.fileno()
        # Two streams to one target share a pipe, which keeps their lines in order.
        shared = os.path.sameopenfile(out, err)
        self._streams = [_Stream(fd, copy, wake) for fd in ([out] if shared else [out, err])]

    @property
    def dropped_bytes(self) -> int:
        """Bytes that no reader took, on all streams."""
        return sum(stream.dropped for stream in self._streams)

    @property
    def stuck(self) -> bool:
        return any(stream.stuck for stream in self._streams)

    @property
    def pending(self) -> bool:
        """Whether an ended source is still being relayed."""
        return any(source.ended for stream in self._streams for source in list(stream.sources))

    def open(self) -> tuple[int, int]:
        """Create pipes for a new launch; returns the ends for its stdout and stderr, which the
        caller closes after the fork. Raises OSError if no descriptor is free."""
        writing: list[int] = []
        try:
            for stream in self._streams:
                reading, writing_end = os.pipe2(os.O_CLOEXEC)
                writing.append(writing_end)
                with contextlib.suppress(OSError):
                    fcntl.fcntl(reading, _F_SETPIPE_SZ, _PIPE_SIZE)
                os.set_blocking(reading, False)
                stream.sources.append(_Source(reading))
                stream.wake()
        except OSError:
            for fd in writing:
                os.close(fd)
            raise
        return writing[0], writing[-1]

    def print_line(self, line: str) -> None:
        """Print whole lines from the guard. May be called from any thread."""
        self._streams[0].print_line(line)

    def end_sources(self) -> None:
        """Relay what the pipes hold now, then close them. Does not wait."""
        for stream in self._streams:
            for source in list(stream.sources):
                source.ended = True
            stream.wake()

    def finish(self, seconds: float) -> None:
        """Flush the remaining output, for at most `seconds`."""
        self.end_sources()
        deadline = time.monotonic() + seconds
        for stream in self._streams:
            stream.finish(max(0.0, deadline - time.monotonic()))


def _sender(fd: int) -> tuple[Callable[[memoryview], int], int]:
    """Return the function that writes to `fd`, and the descriptor to poll. The flags of `fd` stay
    unchanged, because other processes share them."""
    kind = os.fstat(fd).st_mode
    if stat.S_ISSOCK(kind):
        # pm2 passes sockets, which can't be reopened through /proc/self/fd.
        peer = socket.socket(fileno=os.dup(fd))
        return lambda view: peer.send(view, socket.MSG_DONTWAIT), peer.fileno()
    if stat.S_ISFIFO(kind):
        with contextlib.suppress(OSError):
            again = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            return lambda view: os.write(again, view), again
    return lambda view: os.write(fd, view), fd
