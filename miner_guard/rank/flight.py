"""Keeps a flight record in memory that no process can truncate, with a copy on disk: the rank's
writer, and the reader of the supervisor or of an operator long afterwards.

If the record were a mapped file, SIGBUS would kill the rank if something truncated the file, and
the rank would stall whenever the disk did. So the record is a memfd with a sealed size.
`rank-NNNN.live` links to it while the rank is alive. `rank-NNNN.bin` is a copy on disk; the
supervisor keeps it up to date, or one of the rank's threads does if no supervisor reads the record.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import mmap
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from miner_guard.rank import layout
from miner_guard.rank.layout import (
    ALLOWANCE,
    LOCK,
    NAN,
    PHASE_OFFSET,
    SINCE,
    STATE,
    STEPS,
    Identity,
    Now,
    StepRecord,
    json_default,
)
from miner_guard.state_dir import make_folder, open_private, read_regular

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


def _file_of(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


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
        stat = path.stat() if fd is None else os.fstat(fd)
    except OSError:
        return None
    finally:
        if fd is not None:
            os.close(fd)
    return Version(fd is not None, stat.st_dev, stat.st_ino, stat.st_mtime_ns if fd is None else 0)


def withdraw(path: Path) -> None:
    """Remove the link that `publish` made. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if os.readlink(_live(path)).startswith(f"/proc/{os.getpid()}/"):
            _live(path).unlink()


def _live(path: Path) -> Path:
    return path.with_suffix(".live")


def copy(path: Path, record: mmap.mmap) -> None:
    """Bring the copy of `record` at `path` up to date, and hold no descriptor afterwards. May hang
    if the disk does. Raises OSError; ValueError if the record is unmapped."""
    file = _open_copy(path, record)
    if file is None:
        _write_whole(path, record)
        return
    try:
        # The rank goes on writing: a header read after the steps would count steps that the copy
        # lacks, and later copies would begin after them.
        header = record[: layout.HEADER_SIZE]
        in_copy = os.pread(file, layout.COUNTS.size, layout.COUNTS_OFFSET)
        old_steps, old_entries, *_ = layout.COUNTS.unpack(in_copy)
        steps, entries, *_ = layout.COUNTS.unpack_from(header, layout.COUNTS_OFFSET)
        for number in range(max(old_steps, steps - layout.RING_SLOTS), steps):
            _write(file, record, layout.step_offset(number), layout.STEP_SIZE)
        for number in range(max(old_entries, entries - layout.JOURNAL_SLOTS), entries):
            _write(file, record, layout.slot_offset(number), layout.SLOT_SIZE)
        _write(file, header, 0, layout.HEADER_SIZE)
    finally:
        os.close(file)


def _open_copy(path: Path, record: mmap.mmap) -> int | None:
    """Open the copy; None unless it is complete and of the same record."""
    try:
        file = open_private(path, os.O_RDWR)
    except OSError:
        return None
    same = False
    try:
        identity = os.pread(file, layout.IDENTITY.size, layout.IDENTITY_OFFSET)
        same = (
            os.fstat(file).st_size == layout.FILE_SIZE
            and identity == record[: layout.IDENTITY.size]
        )
        return file if same else None
    finally:
        if not same:
            os.close(file)


def _write_whole(path: Path, record: mmap.mmap) -> None:
    make_folder(path.parent)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    file = open_private(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        _write(file, record, 0, layout.FILE_SIZE)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)


def _write(file: int, record: mmap.mmap | bytes, offset: int, size: int) -> None:
    if os.pwrite(file, record[offset : offset + size], offset) != size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def copy_now(path: Path, fd: int) -> None:
    """Copy the record open as `fd` once. Ignores disk errors."""
    with (
        contextlib.suppress(OSError),
        mmap.mmap(fd, layout.FILE_SIZE, access=mmap.ACCESS_READ) as record,
    ):
        copy(path, record)


class CopyThread:
    """Copies one record once per second in its own thread. Only `close` waits for the disk."""

    def __init__(self, path: Path, record: mmap.mmap, is_due: Callable[[], bool]) -> None:
        """`is_due` is called before each copy; if it returns False, that copy is skipped."""
        self._path = path
        self._record = record
        self._is_due = is_due
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flight-copy", daemon=True)
        # If no more threads can be started, the record has a copy only if a supervisor keeps one.
        with contextlib.suppress(RuntimeError):
            self._thread.start()

    def close(self, within_s: float) -> None:
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
                        copy(self._path, self._record)


_LAST_COPY_S = 2.0
"""How long an exiting rank waits for the disk to complete the last copy."""

_RUNNING = layout.STATES.index("running")


def process_start(pid: int) -> int:
    """Return when a process started, in clock ticks since boot. Raises OSError if there is no such
    process."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rsplit(b")", 1)[1].split()[19])


class FlightWriter:
    """Writes one rank's flight record. Thread-safe. Recording makes no system calls and never
    blocks.

    The header's first word is a sequence lock: it is odd while the header is being written, and a
    reader that sees it odd or changed tries again. All counts are in the file.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        local_rank: int,
        world_size: int,
        run_id: str,
        local_world_size: int = 0,
        pid: int | None = None,
    ) -> None:
        """`local_world_size`: 0 means unknown. `pid`: the process that the record describes;
        default: this one. Raises OSError."""
        self.path = path
        self.map, self._fd = create()
        self._owner = os.getpid()
        pid = os.getpid() if pid is None else pid
        start = process_start(pid)
        Identity(
            pid, rank, local_rank, world_size, start, run_id, time.time(), local_world_size
        ).pack_into(self.map)
        layout.STEPPED.pack_into(self.map, layout.STEPPED_OFFSET, 0.0, -1, -1, 0, NAN, NAN, NAN)
        header = memoryview(self.map)[layout.NOW_OFFSET : layout.NOW_OFFSET + layout.NOW.size]
        # Native byte order is the file's little endian: torch on Linux runs on little-endian
        # machines only.
        self._words = header.cast("Q")
        self._reals = header.cast("d")
        # The lock is reentrant because a signal handler of the miner may close the guard in the
        # middle of a step.
        self._lock = threading.RLock()
        # Publish last: the record is now complete.
        self.unpublished: OSError | None = None
        """The error that keeps other processes from event the record; None if they can find
        it."""

        self._publish()

    def _publish(self) -> None:
        """Let other processes find the record. If the disk is full, `keep_copy`'s thread tries
        again; nothing is lost, because the record is in memory."""
        try:
            publish(self.path, self._fd)
            self.unpublished = None
        except OSError as error:
            self.unpublished = error

    def attached(self) -> bool:
        """Return whether a supervisor has opened the record; it then keeps the copy on disk up to
        date."""
        return bool(layout.ATTACHED.unpack_from(self.map, layout.ATTACHED_OFFSET)[0])

    def keep_copy(self, alone: Callable[[], bool]) -> None:
        """Start a thread that keeps the copy on disk up to date while no supervisor does, and makes
        a last copy at exit. `alone()`: whether the supervisor that had opened the record is
        gone."""

        def unkept() -> bool:
            if os.getpid() != self._owner:
                # This is a fork of the rank that is exiting.
                return False
            if self.unpublished is not None:
                self._publish()
            return alone() or not self.attached()

        thread = CopyThread(self.path, self.map, unkept)
        atexit.register(thread.close, _LAST_COPY_S)

    def show_state(self, state: str, now: float) -> None:
        """Write `state` (one of `layout.STATES`) to the header, and clear the phase."""
        with self._lock:
            words = self._words
            words[LOCK] |= 1
            words[STATE] = layout.STATES.index(state)
            layout.PHASE.pack_into(self.map, PHASE_OFFSET, b"", now, now)
            self._reals[ALLOWANCE] = NAN
            words[LOCK] += 1

    def show_phase(self, name: bytes, since: float, heartbeat: float, allowance_s: float) -> None:
        """Write the innermost phase to the header. `name` has at most 24 bytes; `b""` means that no
        phase is open. If `allowance_s` is NaN, the default limit applies."""
        with self._lock:
            words = self._words
            words[LOCK] |= 1
            layout.PHASE.pack_into(self.map, PHASE_OFFSET, name, since, heartbeat)
            self._reals[ALLOWANCE] = allowance_s
            words[LOCK] += 1

    def show_operation(self, name: bytes, since: float) -> None:
        """Write the open monitoring operation to the header; `b""` means that none is open."""
        with self._lock:
            words = self._words
            words[LOCK] |= 1
            layout.OPERATION.pack_into(self.map, layout.OPERATION_OFFSET, name[:48], since)
            words[LOCK] += 1

    def append(self, record: StepRecord) -> None:
        """Number a step, append it, and show it in the header. The header's phase does not
        change."""
        with self._lock:
            words, end = self._words, record.end
            record.number = number = words[STEPS]
            record.pack_into(self.map)
            words[LOCK] |= 1
            words[STATE] = _RUNNING
            record.show_in(self.map)
            if not self.map[PHASE_OFFSET]:
                self._reals[SINCE] = end
            words[STEPS] = number + 1
            words[LOCK] += 1

    def journal(self, document: Mapping[str, Any]) -> bool:
        """Append an entry that must not be lost. Returns False and counts it as lost if it is too
        large or if 64 entries are waiting for the supervisor to store them."""
        payload = json.dumps(document, separators=(",", ":"), default=json_default).encode()
        with self._lock:
            number = self.entries_written
            if self.room() <= 0 or len(payload) > layout.SLOT_PAYLOAD:
                self._count(layout.LOST, self.lost + 1)
                return False
            offset = layout.slot_offset(number)
            self.map[offset + layout.SLOT.size : offset + layout.SLOT.size + len(payload)] = payload
            layout.SLOT.pack_into(self.map, offset, number + 1, len(payload), zlib.crc32(payload))
            self._count(layout.ENTRIES, number + 1)
        return True

    def dropped(self, count: int) -> None:
        """Record in the header how many datagrams did not reach the supervisor."""
        with self._lock:
            self._count(layout.DROPPED, count)

    def _count(self, word: int, value: int) -> None:
        self._words[LOCK] |= 1
        self._words[word] = value
        self._words[LOCK] += 1

    @property
    def entries_written(self) -> int:
        return self._words[layout.ENTRIES]

    @property
    def lost(self) -> int:
        return self._words[layout.LOST]

    def acknowledged(self) -> int:
        count: int = layout.ACK.unpack_from(self.map, layout.ACK_OFFSET)[0]
        return count

    def room(self) -> int:
        return layout.JOURNAL_SLOTS - (self.entries_written - self.acknowledged())

    def checkpoint_requests(self) -> int:
        """Return how many checkpoints the supervisor has asked for since the record was opened."""
        count: int = layout.REQUESTS.unpack_from(self.map, layout.REQUESTS_OFFSET)[0]
        return count

    def close(self) -> None:
        if not self.attached():
            copy_now(self.path, self._fd)
        with contextlib.suppress(OSError):
            withdraw(self.path)
        self._words.release()
        self._reals.release()
        self.map.close()


_TRIES = 50
"""How many times to try to read a header that a rank is writing. The write takes a few
microseconds; a rank killed in the middle of it leaves the header torn."""


class BadFlight(Exception):
    """The file is not a complete flight record of this version; the message says why."""


class FlightReader:
    """Reads a flight record, live or as a copy on disk."""

    def __init__(self, path: Path, *, acknowledge: bool = False) -> None:
        """`acknowledge` opens the record for writing too; only the supervisor may. Raises OSError
        or BadFlight."""
        self.path = path
        self._fd = open_live(path, os.O_RDWR if acknowledge else os.O_RDONLY)
        self.live = self._fd is not None
        """Whether this reads the memory that the rank writes; otherwise it reads a copy from
        disk."""

        self._map: mmap.mmap | bytearray = (
            _copied(path) if self._fd is None else _mapped(self._fd, acknowledge)
        )
        identity = Identity.unpack_from(self._map)
        if identity is None:
            self.close()
            raise BadFlight(f"{self.path}: not a version {layout.VERSION} flight record")
        self.identity = identity
        if acknowledge and self.live:
            layout.ATTACHED.pack_into(self._map, layout.ATTACHED_OFFSET, os.getpid())

    def fileno(self) -> int:
        """The descriptor of the record's memory. Valid only if `live`."""
        assert self._fd is not None
        return self._fd

    def now(self) -> Now | None:
        """The header; None if the rank has not written one yet, or if every read was torn."""
        for _ in range(_TRIES):
            now = Now.unpack_from(self._map)
            if now is not None:
                return now
        return None

    def step(self, number: int) -> StepRecord | None:
        """Step record `number` (counting from 0); None if it is torn, overwritten or not written
        yet."""
        return StepRecord.unpack_from(self._map, number)

    def steps(self, since: int = 0) -> Iterator[StepRecord]:
        """All readable step records from number `since`, oldest first."""
        written, *_ = self._counts()
        for number in range(max(since, written - layout.RING_SLOTS), written):
            step = self.step(number)
            if step is not None:
                yield step

    def entries(self, since: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        """Journal entries from number `since` as (number, document); skips torn ones."""
        _, written, *_ = self._counts()
        for number in range(max(since, written - layout.JOURNAL_SLOTS), written):
            document = self._entry(number)
            if document is not None:
                yield number, document

    def _counts(self) -> tuple[int, ...]:
        """The counts, read without regard to the sequence lock, which a killed rank may have left
        locked. That is safe because each record has its own check."""
        return layout.COUNTS.unpack_from(self._map, layout.COUNTS_OFFSET)

    def _entry(self, number: int) -> dict[str, Any] | None:
        offset = layout.slot_offset(number)
        sequence, length, crc = layout.SLOT.unpack_from(self._map, offset)
        if sequence != number + 1 or length > layout.SLOT_PAYLOAD:
            return None
        payload = self._map[offset + layout.SLOT.size : offset + layout.SLOT.size + length]
        if zlib.crc32(payload) != crc:
            return None
        document = json.loads(payload)
        return document if isinstance(document, dict) else None

    def acknowledge(self, count: int) -> None:
        """Tell the rank that the first `count` journal entries are stored."""
        layout.ACK.pack_into(self._map, layout.ACK_OFFSET, count)
        if not self.live:
            # Tell the next supervisor. If this fails, that supervisor receives the entries twice.
            with contextlib.suppress(OSError):
                fd = open_private(self.path, os.O_WRONLY)
                try:
                    os.pwrite(fd, layout.ACK.pack(count), layout.ACK_OFFSET)
                finally:
                    os.close(fd)

    def acknowledged(self) -> int:
        count: int = layout.ACK.unpack_from(self._map, layout.ACK_OFFSET)[0]
        return count

    def request_checkpoint(self) -> None:
        """Ask the rank for one more checkpoint. Needs a reader opened with `acknowledge=True`."""
        count: int = layout.REQUESTS.unpack_from(self._map, layout.REQUESTS_OFFSET)[0]
        layout.REQUESTS.pack_into(self._map, layout.REQUESTS_OFFSET, count + 1)

    def close(self) -> None:
        if isinstance(self._map, mmap.mmap):
            self._map.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _mapped(fd: int, writable: bool) -> mmap.mmap:
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    try:
        return mmap.mmap(fd, layout.FILE_SIZE, access=access)
    except (OSError, ValueError):
        os.close(fd)
        raise


def _copied(path: Path) -> bytearray:
    """Read the copy at `path`. It is not mapped, because truncating a mapped file would kill the
    reader with SIGBUS."""
    data = read_regular(path, layout.FILE_SIZE + 1)
    if len(data) != layout.FILE_SIZE:
        raise BadFlight(f"{path}: {path.stat().st_size} bytes, expected {layout.FILE_SIZE}")
    return bytearray(data)
