"""Reads the miner's output from its pipes, passes it on unchanged, and feeds it to the monitors."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable

from miner_guard.guard.backlog import PLAIN, Backlog
from miner_guard.guard.loop import Loop
from miner_guard.guard.output_writer import OutputWriter, same_target
from miner_guard.system import free_memory

CHUNK = 65536
_PIPE_SIZE = 1024 * 1024
F_SETPIPE_SZ = 1031

_NAP_S = 0.002
"""Pause before the next read of a pipe whose writer prints many small pieces: waking up for each
piece would cost both sides more than reading it. During the pause the pipe absorbs up to 500
MB/s."""

_SMALL = CHUNK // 4

_UNSEEN = 64 * 1024 * 1024
_UNSEEN_HELD = 6 * 1024 * 1024
"""Limits for output that the monitors have not seen yet, and for the memory that it occupies. The
guard relays a burst up to this size as fast as it can copy. For a larger one, it slows the miner
down to the monitors' speed."""

_BURST = 8 * 1024 * 1024
"""After a backlog of more than this, the guard returns free memory to the system."""

_SLICE = 128 * 1024
_SLICE_S = 0.05
"""Bytes and time per delivery to the monitors. A delivery takes less time than a pipe takes to
fill, so the miner does not wait for it."""

_BLOCK = 4 * CHUNK
"""How many bytes of a burst to read at once, and to pass to the monitors per call while they keep
up. With smaller blocks, the reading and writing threads wait for each other more often, and the
overhead of calling the monitors equals the time that they spend searching."""

_COMPRESSION_S = 3e-9
"""Approximate seconds per byte to compress and expand a burst. The monitors get that much time
while a burst is arriving. They read ordinary lines faster, so a burst of those is not buffered."""

LAST_WORDS = 256 * 1024
LAST_WORDS_S = 2.0
"""Bytes at the end of a launch's output that the monitors read even if they have fallen behind (the
traceback is there), and how many seconds they have to do so."""


class Relay:
    """Relays the output of successive launches. Only `print_line` may be called outside the loop's
    thread."""

    def __init__(self, loop: Loop, on_chunk: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._on_chunk = on_chunk
        self._out = OutputWriter(sys.stdout.fileno(), self._room)
        shared = same_target(sys.stdout.fileno(), sys.stderr.fileno())
        self._err = self._out if shared else OutputWriter(sys.stderr.fileno(), self._room)
        self._sources: dict[int, OutputWriter] = {}
        self._paused: set[int] = set()
        self._napping: set[int] = set()
        self._read_at: dict[int, float] = {}
        self._unseen = Backlog()
        self._burst = False
        """Whether the backlog exceeded `_BURST` and its memory has not been returned yet."""

        self._fresh = 0
        """Bytes that have arrived since the last delivery to the monitors."""

        self._fast = False
        """Whether the monitors read the latest burst faster than the backlog could have compressed
        it."""

        self.relayed_bytes = 0

    @property
    def writers(self) -> list[OutputWriter]:
        return [self._out] if self._out is self._err else [self._out, self._err]

    @property
    def dropped_bytes(self) -> int:
        """Bytes dropped on all streams."""
        return sum(sink.dropped for sink in self.writers)

    @property
    def unseen(self) -> int:
        """Bytes relayed but not yet passed to the monitors."""
        return self._unseen.size

    @property
    def stuck(self) -> bool:
        return any(sink.stuck for sink in self.writers)

    def open(self) -> tuple[int, int]:
        """Create pipes for a new launch; returns the ends for its stdout and stderr, which the
        caller closes after the fork.

        Raises OSError if no descriptor is free.
        """
        ends: list[int] = []
        for sink in self.writers:
            try:
                read_end, write_end = os.pipe2(os.O_CLOEXEC)
            except OSError:
                for end in ends:
                    os.close(end)
                raise
            with contextlib.suppress(OSError):
                fcntl.fcntl(read_end, F_SETPIPE_SZ, _PIPE_SIZE)
            os.set_blocking(read_end, False)
            self._sources[read_end] = sink
            self._watch(read_end)
            ends.append(write_end)
        return ends[0], ends[-1]

    def print_line(self, line: str) -> None:
        """Print whole lines from the guard. May be called from any thread."""
        self._out.print_line(line)

    def tick(self) -> None:
        """Periodic work: flush pending lines, detect stuck readers, return memory."""
        for sink in self.writers:
            sink.tick()
        if self._burst and not self.unseen and all(sink.idle for sink in self.writers):
            # Wait until the writers are idle: memory that they still hold would not be returned,
            # and nothing would try again.
            self._burst = False
            free_memory.give_back()
        self._resume()

    def _readable(self, fd: int) -> None:
        taken = self._take(fd)
        if fd not in self._sources:
            return
        if self._must_wait(fd):
            self._paused.add(fd)
            self._loop.unwatch(fd)
        elif taken < _SMALL:
            self._rest_from(fd)

    def _must_wait(self, fd: int) -> bool:
        """Return True if the miner prints faster than the guard's reader or the monitors consume
        the output."""
        return self._behind or self._sources[fd].congested

    @property
    def _behind(self) -> bool:
        return self._unseen.size > _UNSEEN or self._unseen.held > _UNSEEN_HELD

    def _rest_from(self, fd: int) -> None:
        """Pause reading from a pipe if small pieces arrive in quick succession."""
        now = time.monotonic()
        follows = now - self._read_at.get(fd, 0.0) < 2 * _NAP_S
        self._read_at[fd] = now
        if follows:
            self._loop.unwatch(fd)
            self._napping.add(fd)
            self._loop.after(_NAP_S, lambda: self._wake(fd))

    def _wake(self, fd: int) -> None:
        if fd in self._napping:
            self._napping.discard(fd)
            self._watch(fd)

    def _watch(self, fd: int) -> None:
        self._loop.watch(fd, lambda: self._readable(fd))

    def _take(self, fd: int) -> int:
        """Read up to one pipe's capacity; returns the number of bytes."""
        chunks: list[bytes] = []
        ended = False
        try:
            ended = self._read(fd, chunks)
        finally:
            taken = sum(map(len, chunks))
            self.relayed_bytes += taken
            if chunks:
                self._sources[fd].put(chunks)
                self._queue(chunks, taken)
        if ended:
            self._close(fd)
        return taken

    def _read(self, fd: int, chunks: list[bytes]) -> bool:
        """Add what the pipe holds to `chunks`; returns whether its last writer has closed it."""
        taken = 0
        while taken < _PIPE_SIZE:
            try:
                data = os.read(fd, _BLOCK)
            except BlockingIOError:
                break
            if not data:
                return True
            chunks.append(data)
            taken += len(data)
            if len(data) < CHUNK:
                # The pipe is empty. After a pause, one read collects the small pieces that arrive
                # next.
                break
        return False

    def _queue(self, chunks: list[bytes], size: int) -> None:
        if not self.unseen:
            self._loop.after(0.0, self._show)
        for data in chunks:
            self._unseen.put(data)
        self._fresh += size

    def _show(self) -> None:
        """Pass some of the relayed output to the monitors. Reading takes priority, unless the
        monitors are too far behind."""
        try:
            if not self._fresh or self._behind:
                self._show_up_to(_SLICE)
            else:
                self._keep_up()
        finally:
            # Schedule the next delivery even after a failure, or the miner would block forever.
            self._fresh = 0
            self._burst = self._burst or self.unseen > _BURST
            if self.unseen:
                self._loop.after(0.0, self._show)
            self._resume()

    def _keep_up(self) -> None:
        """Pass the monitors enough of a burst that the backlog does not have to compress what
        follows."""
        begun, shown, spent = time.thread_time(), 0, 0.0
        while self.unseen > PLAIN // 2 and spent < self._fresh * _COMPRESSION_S:
            data = self._next()
            self._on_chunk(data)
            shown, spent = shown + len(data), time.thread_time() - begun
            self._fast = spent < shown * _COMPRESSION_S

    def _show_up_to(self, size: int, seconds: float = _SLICE_S) -> None:
        over = time.monotonic() + seconds
        while self.unseen and size > 0 and time.monotonic() < over:
            data = self._next()
            size -= len(data)
            self._on_chunk(data)

    def _next(self) -> bytes:
        return self._unseen.take(_BLOCK) if self._fast else self._unseen.part(CHUNK)

    def end_sources(self) -> None:
        """Read what the pipes hold now, then close them, because a surviving process could print
        forever.

        The monitors still receive that output in slices; `unseen` is 0 when they have seen all of
        it.
        """
        for fd in list(self._sources):
            self._take(fd)
        self.close_sources()

    def show_rest(self) -> int:
        """Pass the monitors the last `LAST_WORDS` bytes that they have not seen yet. Returns the
        number of bytes skipped, which they never see."""
        left_out = max(self.unseen - LAST_WORDS, 0)
        self._unseen.skip(left_out)
        self._show_up_to(self.unseen, LAST_WORDS_S)
        return left_out

    def close_sources(self) -> None:
        """Close the pipes of a launch that has ended."""
        for fd in list(self._sources):
            self._close(fd)

    def _close(self, fd: int) -> None:
        self._loop.unwatch(fd)
        self._paused.discard(fd)
        self._napping.discard(fd)
        self._read_at.pop(fd, None)
        del self._sources[fd]
        os.close(fd)

    def _room(self) -> None:
        self._loop.soon(self._resume)

    def _resume(self) -> None:
        for fd in list(self._paused):
            if not self._must_wait(fd):
                self._paused.discard(fd)
                self._watch(fd)

    def finish(self, seconds: float) -> None:
        """Flush the remaining output, for at most `seconds`."""
        self.close_sources()
        for sink in self.writers:
            sink.finish(seconds)
