"""Writes a rank's flight record without system calls after the constructor. The record stays
readable even if every process is killed with SIGKILL."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miner_guard.flight_recorder import layout, memory
from miner_guard.flight_recorder.layout import (
    ALLOWANCE,
    LOCK,
    NAN,
    PHASE_OFFSET,
    SINCE,
    STATE,
    STEPS,
)
from miner_guard.flight_recorder.records import Identity, StepRecord, json_default

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
        self.map, self._fd = memory.create()
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
        """The error that keeps other processes from finding the record; None if they can find
        it."""

        self._publish()

    def _publish(self) -> None:
        """Let other processes find the record. If the disk is full, `keep_copy`'s thread tries
        again; nothing is lost, because the record is in memory."""
        try:
            memory.publish(self.path, self._fd)
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

        thread = memory.CopyThread(memory.Copier(self.path, self.map), unkept)
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
        """Number of journal entries written so far."""
        return self._words[layout.ENTRIES]

    @property
    def lost(self) -> int:
        """Number of journal entries that were dropped for lack of room."""
        return self._words[layout.LOST]

    def acknowledged(self) -> int:
        """Number of journal entries that the supervisor has stored."""
        count: int = layout.ACK.unpack_from(self.map, layout.ACK_OFFSET)[0]
        return count

    def room(self) -> int:
        """Return how many more journal entries fit before the supervisor has to store some."""
        return layout.JOURNAL_SLOTS - (self.entries_written - self.acknowledged())

    def checkpoint_requests(self) -> int:
        """Return how many checkpoints the supervisor has asked for since the record was opened."""
        count: int = layout.REQUESTS.unpack_from(self.map, layout.REQUESTS_OFFSET)[0]
        return count

    def close(self) -> None:
        """Unmap the memory, which closes its descriptor; the copy on disk stays."""
        if not self.attached():
            memory.copy_now(self.path, self._fd)
        with contextlib.suppress(OSError):
            memory.withdraw(self.path)
        self._words.release()
        self._reals.release()
        self.map.close()
