"""Keeps a rank's record in memory that it shares with the guard: the rank's writer and the guard's
reader.

The record is a memfd with a sealed size: if it were a mapped file, SIGBUS would kill the rank if
something truncated the file, and the rank would stall whenever the disk did. The rank hands the
descriptor to the guard (`rank.wire`), so the memory outlives the rank.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from miner_guard.rank import layout
from miner_guard.rank.layout import (
    ALLOWANCE,
    BYTES,
    JOURNAL_OFFSET,
    JOURNAL_SIZE,
    LOCK,
    NAN,
    PHASE_OFFSET,
    RING_OFFSET,
    RING_SLOTS,
    SINCE,
    STATE,
    STEP,
    STEP_SIZE,
    STEPPED,
    STEPPED_OFFSET,
    STEPS,
    Identity,
    Now,
    StepRecord,
    json_default,
)

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL, _SHRINK, _GROW = 1, 2, 4
"""Values from fcntl(2), because some builds of Python lack `fcntl.F_ADD_SEALS`."""

_RUNNING = layout.STATES.index("running")


def process_start(pid: int | str = "self") -> int:
    """Return when a process started, in clock ticks since boot. Raises OSError if there is no such
    process."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rsplit(b")", 1)[1].split()[19])


class FlightWriter:
    """Writes one record. Thread-safe. Recording makes no system calls and never blocks.

    The header's first word is a sequence lock: it is odd while the header is being written, and a
    reader that sees it odd or changed tries again.
    """

    def __init__(self) -> None:
        """Create the memory, zeroed and allocated. Raises OSError."""
        self.memory = os.memfd_create("miner-guard-flight", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """The memory's descriptor."""

        try:
            # Allocate all of it now: if memory is short, the error must occur here and not in the
            # middle of a step.
            os.posix_fallocate(self.memory, 0, layout.MEMORY_SIZE)
            fcntl.fcntl(self.memory, _F_ADD_SEALS, _SEAL | _SHRINK | _GROW)
            self.map = mmap.mmap(self.memory, layout.MEMORY_SIZE)
        except OSError:
            os.close(self.memory)
            raise
        STEPPED.pack_into(self.map, STEPPED_OFFSET, 0.0, -1, -1, 0, NAN, NAN, NAN)
        header = memoryview(self.map)[layout.NOW_OFFSET : layout.NOW_OFFSET + layout.NOW.size]
        # Native byte order is the layout's little endian: torch on Linux runs on little-endian
        # machines only.
        self._words = header.cast("Q")
        self._reals = header.cast("d")
        self._by_guard = memoryview(self.map)[: layout.NOW_OFFSET].cast("Q")
        # The lock is reentrant because a signal handler of the miner may close the guard in the
        # middle of a step.
        self._lock = threading.RLock()

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

    def append(self, values: tuple[float, ...]) -> None:
        """Append a step, `StepRecord.packed`, and show it in the header. The header's phase does
        not change."""
        outer, inner, total, _, end, _, loss, lr, _, _, allocated, *_ = values
        with self._lock:
            words, memory = self._words, self.map
            number = words[STEPS]
            offset = RING_OFFSET + number % RING_SLOTS * STEP_SIZE
            STEP.pack_into(memory, offset, number + 1, *values, number + 1)
            words[LOCK] |= 1
            words[STATE] = _RUNNING
            STEPPED.pack_into(memory, STEPPED_OFFSET, end, outer, inner, total, loss, lr, allocated)
            if not memory[PHASE_OFFSET]:
                self._reals[SINCE] = end
            words[STEPS] = number + 1
            words[LOCK] += 1

    def journal(self, document: Mapping[str, Any]) -> bool:
        """Append an entry that must not be lost. Returns False and counts it as lost if it does not
        fit beside those that the guard has not stored yet."""
        line = json.dumps(document, separators=(",", ":"), default=json_default).encode() + b"\n"
        with self._lock:
            words, fits = self._words, len(line) <= self.room()
            if fits:
                at = words[BYTES] % JOURNAL_SIZE
                first, rest = line[: JOURNAL_SIZE - at], line[JOURNAL_SIZE - at :]
                self.map[JOURNAL_OFFSET + at : JOURNAL_OFFSET + at + len(first)] = first
                self.map[JOURNAL_OFFSET : JOURNAL_OFFSET + len(rest)] = rest
            words[LOCK] |= 1
            words[BYTES] += len(line) if fits else 0
            words[layout.LOST] += not fits
            words[LOCK] += 1
        return fits

    def room(self) -> int:
        """The journal's free bytes."""
        return JOURNAL_SIZE - (self._words[BYTES] - self._by_guard[layout.BYTES_READ])

    def checkpoint_requests(self) -> int:
        """Return how many checkpoints the guard has asked for since the record was opened."""
        return self._by_guard[layout.REQUESTS]

    def take_up(self, requests: int, *, again: bool) -> None:
        """Note that the training loop has learned of so many requests, just now or, if it looks
        `again`, before: then it has saved in between."""
        layout.TAKEN_UP.pack_into(self.map, layout.TAKEN_UP_OFFSET, requests + 1, again)

    def close(self) -> None:
        for view in (self._words, self._reals, self._by_guard):
            view.release()
        self.map.close()
        os.close(self.memory)


_TRIES = 50
"""How many times to try to read a header that a rank is writing. The write takes a few
microseconds; a rank killed in the middle of it leaves the header torn."""


class FlightReader:
    """Reads a rank's record, and tells the rank what the guard has stored of it."""

    def __init__(self, memory: int, identity: Identity) -> None:
        """`memory`: the descriptor that the rank handed over; stays the caller's. Raises OSError,
        including for memory that the rank could shrink, which would kill the reader (SIGBUS)."""
        sealed = fcntl.fcntl(memory, _F_GET_SEALS) & _SHRINK
        if not sealed or os.fstat(memory).st_size != layout.MEMORY_SIZE:
            raise OSError("not a record of this version")
        self.identity = identity
        self._map = mmap.mmap(memory, layout.MEMORY_SIZE)
        self._by_guard = memoryview(self._map)[: layout.NOW_OFFSET].cast("Q")

    def now(self) -> Now | None:
        """The header; None if the rank has not written one yet, or if every read was torn."""
        for _ in range(_TRIES):
            now = Now.unpack_from(self._map)
            if now is not None:
                return now
        return None

    @property
    def steps_read(self) -> int:
        """Number of step records that the guard has stored."""
        return self._by_guard[layout.STEPS_READ]

    @steps_read.setter
    def steps_read(self, count: int) -> None:
        self._by_guard[layout.STEPS_READ] = count

    @property
    def bytes_read(self) -> int:
        """Number of bytes of the journal that the guard has stored."""
        return self._by_guard[layout.BYTES_READ]

    @bytes_read.setter
    def bytes_read(self, count: int) -> None:
        self._by_guard[layout.BYTES_READ] = count

    def steps(self, since: int = 0) -> Iterator[StepRecord]:
        """All readable step records from number `since`, oldest first; skips torn ones."""
        written, _ = self._counts()
        for number in range(max(since, written - RING_SLOTS), written):
            step = StepRecord.unpack_from(self._map, number)
            if step is not None:
                yield step

    def entries(self, since: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """The journal's entries from byte `since`, each with the byte at which it ends."""
        _, written = self._counts()
        at, size = since % JOURNAL_SIZE, min(written - since, JOURNAL_SIZE)
        journal = self._map[JOURNAL_OFFSET + at : JOURNAL_OFFSET + min(at + size, JOURNAL_SIZE)]
        journal += self._map[JOURNAL_OFFSET : JOURNAL_OFFSET + max(0, at + size - JOURNAL_SIZE)]
        for line in journal.splitlines(keepends=True):
            since += len(line)
            yield since, json.loads(line)

    def _counts(self) -> tuple[int, int]:
        """The counts, read without regard to the sequence lock, which a killed rank may have left
        locked. That is safe because they change last."""
        steps, written = layout.COUNTS.unpack_from(self._map, layout.COUNTS_OFFSET)
        return steps, written

    def request_checkpoint(self) -> None:
        """Ask the rank for one more checkpoint."""
        self._by_guard[layout.REQUESTS] += 1

    def has_saved(self) -> bool | None:
        """Whether the rank has saved the checkpoint that it was asked for last; None if its
        training loop never looks for requests."""
        taken_up, again = layout.TAKEN_UP.unpack_from(self._map, layout.TAKEN_UP_OFFSET)
        if not taken_up:
            return None
        return bool(taken_up > self._by_guard[layout.REQUESTS] and again)

    def close(self) -> None:
        self._by_guard.release()
        self._map.close()
