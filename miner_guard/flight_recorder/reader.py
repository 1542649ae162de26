"""Reads flight records, for the supervisor while the rank is alive or for an operator long
afterwards."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miner_guard.flight_recorder import layout, memory
from miner_guard.flight_recorder.records import Identity, Now, StepRecord
from miner_guard.state_dir import open_private, read_regular

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
        self._fd = memory.open_live(path, os.O_RDWR if acknowledge else os.O_RDONLY)
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
        """Number of journal entries that this or an earlier supervisor has acknowledged."""
        count: int = layout.ACK.unpack_from(self._map, layout.ACK_OFFSET)[0]
        return count

    def request_checkpoint(self) -> None:
        """Ask the rank for one more checkpoint. Needs a reader opened with `acknowledge=True`."""
        asked: int = layout.REQUESTS.unpack_from(self._map, layout.REQUESTS_OFFSET)[0]
        layout.REQUESTS.pack_into(self._map, layout.REQUESTS_OFFSET, asked + 1)

    def close(self) -> None:
        """Unmap the record and close its descriptor."""
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
