"""The rank's side of the flight record: no system call after the constructor, readable after kill -9 of everything."""

from __future__ import annotations

import json
import mmap
import os
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miner_guard.flight_recorder import layout
from miner_guard.flight_recorder.records import json_default
from miner_guard.statedir import make_folder, open_private


def process_start(pid: int) -> int:
    """Start of a process in clock ticks since boot. Raises OSError where there is none."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rsplit(b")", 1)[1].split()[19])


class FlightWriter:
    """The rank's side. Nothing here blocks; only the constructor makes system calls and may raise OSError."""

    def __init__(
        self, path: Path, *, rank: int, local_rank: int, world_size: int, run_id: str, local_world_size: int = 0,
        pid: int | None = None,
    ) -> None:  # fmt: skip
        """`local_world_size`: 0 is unknown. `pid`: whose record it is, where not this process's. Raises OSError."""
        make_folder(path.parent)
        draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(open_private(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC), "w+b") as file:
                # Allocated, not sparse: a full disk must show here, not as SIGBUS in the middle of a step.
                os.posix_fallocate(file.fileno(), 0, layout.FILE_SIZE)
                self._map = mmap.mmap(file.fileno(), layout.FILE_SIZE)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        pid = os.getpid() if pid is None else pid
        layout.IDENTITY.pack_into(
            self._map, layout.IDENTITY_OFFSET, layout.MAGIC, layout.VERSION, pid, rank, local_rank, world_size,
            process_start(pid), run_id.encode()[:16], time.time(), local_world_size,
        )  # fmt: skip
        self._lock = 0
        self.steps_written = 0
        self.entries_written = 0
        self.dropped = 0
        self.lost = 0
        os.replace(draft, path)

    def now(
        self, *, state: int, phase: bytes, phase_since: float, heartbeat: float, outer_step: int, inner_step: int,
        total_steps: int, loss: float, lr: float, allocated_bytes: float, allowance_s: float,
    ) -> None:  # fmt: skip
        """Replace the header. Unknown numbers are NaN, unknown counts -1."""
        self._lock += 2
        # Odd while it is being written: a reader that sees an odd or a changed number tries again.
        layout.ACK.pack_into(self._map, layout.NOW_OFFSET, self._lock - 1)
        layout.NOW.pack_into(
            self._map, layout.NOW_OFFSET, self._lock - 1, state, phase[:24], phase_since, heartbeat, outer_step,
            inner_step, total_steps, loss, lr, allocated_bytes, allowance_s, self.steps_written,
            self.entries_written, self.dropped, self.lost,
        )  # fmt: skip
        layout.ACK.pack_into(self._map, layout.NOW_OFFSET, self._lock)

    def phase(self, name: bytes, since: float, heartbeat: float, allowance_s: float) -> None:
        """Replace what the header says of the phase. `name` has at most 24 bytes."""
        self._lock += 2
        layout.ACK.pack_into(self._map, layout.NOW_OFFSET, self._lock - 1)
        layout.PHASE.pack_into(self._map, layout.PHASE_OFFSET, name, since, heartbeat)
        layout.ALLOWANCE.pack_into(self._map, layout.ALLOWANCE_OFFSET, allowance_s)
        layout.ACK.pack_into(self._map, layout.NOW_OFFSET, self._lock)

    def step(
        self, outer_step: int, inner_step: int, total_steps: int, start: float, end: float, wall: float,
        loss: float, lr: float, grad_norm: float, eval_loss: float, allocated: float, reserved: float, tokens: int,
        flags: int, phases: list[float], nested: float,
    ) -> None:  # fmt: skip
        """Append a step record; `phases` has one entry per `layout.PHASES`."""
        number = self.steps_written
        layout.STEP.pack_into(
            self._map, layout.step_offset(number), number + 1, outer_step, inner_step, total_steps, start, end, wall,
            loss, lr, grad_norm, eval_loss, allocated, reserved, tokens, flags,
            layout.check_of(number, inner_step, end), *phases, nested,
        )  # fmt: skip
        self.steps_written = number + 1

    def acknowledged(self) -> int:
        """Journal entries that the supervisor has stored."""
        count: int = layout.ACK.unpack_from(self._map, layout.ACK_OFFSET)[0]
        return count

    def journal(self, document: Mapping[str, Any]) -> bool:
        """Append an entry that must not be lost. False where 64 unstored ones wait already, or it is too large."""
        payload = json.dumps(document, separators=(",", ":"), default=json_default).encode()
        number = self.entries_written
        if self.room() <= 0 or len(payload) > layout.SLOT_PAYLOAD:
            self.lost += 1
            self._publish_counts()
            return False
        offset = layout.slot_offset(number)
        self._map[offset + layout.SLOT.size : offset + layout.SLOT.size + len(payload)] = payload
        layout.SLOT.pack_into(self._map, offset, number + 1, len(payload), zlib.crc32(payload))
        self.entries_written = number + 1
        self._publish_counts()
        return True

    def room(self) -> int:
        """Journal entries that still fit before the supervisor stores some."""
        return layout.JOURNAL_SLOTS - (self.entries_written - self.acknowledged())

    def _publish_counts(self) -> None:
        self._lock += 2
        layout.ACK.pack_into(self._map, layout.NOW_OFFSET, self._lock - 1)
        layout.COUNTS.pack_into(
            self._map, layout.COUNTS_OFFSET, self.steps_written, self.entries_written, self.dropped, self.lost
        )
        layout.ACK.pack_into(self._map, layout.NOW_OFFSET, self._lock)

    def checkpoint_requests(self) -> int:
        """How many checkpoints the supervisor has asked for since the record was opened."""
        count: int = layout.REQUESTS.unpack_from(self._map, layout.REQUESTS_OFFSET)[0]
        return count

    def close(self) -> None:
        """Unmap. The file stays for whoever reads it."""
        self._map.close()
