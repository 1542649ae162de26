"""Stores a flight record in memory that no process can truncate, with a copy on disk.

If the record were a mapped file, SIGBUS would kill the rank if something truncated the file, and
the rank would stall whenever the disk did. So the record is a memfd with a sealed size.
`rank-NNNN.live` links to it while the rank is alive. `rank-NNNN.bin` is a copy on disk; the
supervisor keeps it up to date, or one of the rank's threads does if no supervisor reads the record.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from miner_guard.flight_recorder import layout
from miner_guard.state_dir import make_folder, open_private

COPY_EVERY_S = 1.0
"""Interval between copies. If the supervisor and the rank are killed at the same moment, at most
this much is lost."""

_NAME = "miner-guard-flight"
_F_ADD_SEALS = 1033
_SEAL, _SHRINK, _GROW = 1, 2, 4
"""Values from fcntl(2), because some builds of Python lack `fcntl.F_ADD_SEALS`."""


def create() -> tuple[mmap.mmap, int]:
    """Create a record's memory, zeroed, allocated and mapped. Returns the mapping and its only
    descriptor, which closes with the mapping. Raises OSError."""
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Allocate all of it now: if memory is short, the error must occur here and not in the
        # middle of a step.
        os.posix_fallocate(fd, 0, layout.FILE_SIZE)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL | _SHRINK | _GROW)
        mapping = mmap.mmap(fd, layout.FILE_SIZE)
        return mapping, _duplicate_of(fd)
    finally:
        os.close(fd)


def _duplicate_of(fd: int) -> int:
    """Return the descriptor that the mapping holds for the same file, so that a rank needs only
    one. Raises OSError."""
    target = _file_of(os.fstat(fd))
    for name in os.listdir("/proc/self/fd"):
        # Another thread may close a descriptor while this loop runs.
        with contextlib.suppress(OSError):
            if int(name) != fd and _file_of(os.fstat(int(name))) == target:
                return int(name)
    raise FileNotFoundError(errno.ENOENT, "/proc/self/fd does not show the flight record's memory")


def _file_of(seen: os.stat_result) -> tuple[int, int]:
    return seen.st_dev, seen.st_ino


def publish(path: Path, fd: int) -> None:
    """Link this process's memory `fd` next to `path`, where readers find it. Raises OSError."""
    make_folder(path.parent)
    draft = path.with_name(f".{path.stem}.{os.getpid()}.live")
    draft.unlink(missing_ok=True)
    draft.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
    os.replace(draft, _live(path))


def open_live(path: Path, flags: int) -> int | None:
    """Open the memory whose copy is at `path`; None if its rank has exited."""
    try:
        target = os.readlink(_live(path))
        # Another process may have reused the pid, and its descriptor with that number may be any
        # file.
        if not os.readlink(target).startswith(f"/memfd:{_NAME}"):
            return None
        return os.open(target, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None


class Version(NamedTuple):
    """Distinguishes different records at the same `path`, and different states of a copy."""

    live: bool
    device: int
    inode: int
    modified_ns: int
    """0 if `live`."""


def version(path: Path) -> Version | None:
    """The version of the record that can be read at `path` now; None if none can be read."""
    fd = open_live(path, os.O_RDONLY)
    try:
        seen = path.stat() if fd is None else os.fstat(fd)
    except OSError:
        return None
    finally:
        if fd is not None:
            os.close(fd)
    return Version(fd is not None, seen.st_dev, seen.st_ino, seen.st_mtime_ns if fd is None else 0)


def withdraw(path: Path) -> None:
    """Remove the link that `publish` made. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if os.readlink(_live(path)).startswith(f"/proc/{os.getpid()}/"):
            _live(path).unlink()


def _live(path: Path) -> Path:
    return path.with_suffix(".live")


class Copier:
    """Keeps the copy of one record up to date, and holds no descriptor between copies. Use it from
    one thread only; that thread may hang if the disk does."""

    def __init__(self, path: Path, record: mmap.mmap) -> None:
        self.path = path
        self._record = record
        self._file: tuple[int, int] | None = None
        """Identifies the file that the last `copy` wrote; None if it must be written whole."""

        self._steps = self._entries = 0

    def copy(self) -> None:
        """Write everything that is new since the last copy. Raises OSError; ValueError if the
        record is unmapped."""
        steps, entries, *_ = layout.COUNTS.unpack_from(self._record, layout.COUNTS_OFFSET)
        before, self._file = self._file, None
        file = None if before is None else self._open(before)
        try:
            if file is None:
                file = self._write_whole()
            else:
                for number in range(max(self._steps, steps - layout.RING_SLOTS), steps):
                    self._write(file, layout.step_offset(number), layout.STEP_SIZE)
                for number in range(max(self._entries, entries - layout.JOURNAL_SLOTS), entries):
                    self._write(file, layout.slot_offset(number), layout.SLOT_SIZE)
                # Write the header last, so that it never counts a step that the copy lacks.
                self._write(file, 0, layout.HEADER_SIZE)
            self._file = _file_of(os.fstat(file))
        finally:
            if file is not None:
                os.close(file)
        self._steps, self._entries = steps, entries

    def _open(self, before: tuple[int, int]) -> int | None:
        """Open the copy; None unless it is complete and still the same file as `before`. Compare
        the record's identity too, because the file system may reuse the inode for another file."""
        try:
            file = open_private(self.path, os.O_RDWR)
        except OSError:
            return None
        same = False
        try:
            seen = os.fstat(file)
            same = (
                _file_of(seen) == before
                and seen.st_size == layout.FILE_SIZE
                and os.pread(file, layout.IDENTITY.size, layout.IDENTITY_OFFSET)
                == self._record[: layout.IDENTITY.size]
            )
            return file if same else None
        finally:
            if not same:
                os.close(file)

    def _write_whole(self) -> int:
        make_folder(self.path.parent)
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        file = open_private(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            self._write(file, 0, layout.FILE_SIZE)
            os.replace(draft, self.path)
        except BaseException:
            os.close(file)
            draft.unlink(missing_ok=True)
            raise
        return file

    def _write(self, file: int, offset: int, size: int) -> None:
        if os.pwrite(file, self._record[offset : offset + size], offset) != size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def copy_now(path: Path, fd: int) -> None:
    """Copy the record open as `fd` once. Ignores disk errors."""
    with (
        contextlib.suppress(OSError),
        mmap.mmap(fd, layout.FILE_SIZE, access=mmap.ACCESS_READ) as record,
    ):
        Copier(path, record).copy()


class CopyThread:
    """Copies one record once per second in its own thread. Only `close` waits for the disk."""

    def __init__(self, copier: Copier, is_due: Callable[[], bool]) -> None:
        """`is_due` is called before each copy; if it returns False, that copy is skipped."""
        self._copier = copier
        self._is_due = is_due
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flight-copy", daemon=True)
        # If no more threads can be started, the record has a copy only if a supervisor keeps one.
        with contextlib.suppress(RuntimeError):
            self._thread.start()

    def close(self, within_s: float) -> None:
        """Stop, after a last copy if the disk completes it in time."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(within_s)

    def _run(self) -> None:
        closed = False
        # ValueError: the record is closed, after its last copy.
        with contextlib.suppress(ValueError):
            while not closed:
                closed = self._closed.wait(COPY_EVERY_S)
                if self._is_due():
                    # If the disk is full, the next copy tries again.
                    with contextlib.suppress(OSError):
                        self._copier.copy()
