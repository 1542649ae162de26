"""The flight record: written without a system call by the rank, readable after kill -9 of everything."""

from __future__ import annotations

import json
import mmap
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miner_guard.rank import layout
from miner_guard.rank.layout import FLAG_EVAL_LOSS_GIVEN, FLAG_GRAD_NORM_GIVEN, known, known_count
from miner_guard.rank.layout import FLAG_LOSS_GIVEN as FLAG_LOSS_GIVEN
from miner_guard.rank.numbers import in_words


class BadFlight(Exception):
    """The file is not a whole flight record of this version; the message says why."""


@dataclass(frozen=True)
class Identity:
    """Whose flight record it is."""

    pid: int
    rank: int
    local_rank: int
    world_size: int
    process_start: int
    """Clock ticks since boot, field 22 of /proc/PID/stat: tells a pid from its reuse."""

    run_id: str
    opened: float
    """Wall time."""

    local_world_size: int
    """Ranks of this host; 0 where nobody told."""


@dataclass(frozen=True)
class Now:
    """What the rank is doing."""

    state: str
    phase: str
    """Name of the innermost phase, empty between phases."""

    phase_since: float
    heartbeat: float
    """Monotonic time of the last phase change or step."""

    outer_step: int | None
    inner_step: int | None
    total_steps: int
    loss: float | None
    lr: float | None
    allocated_bytes: float | None
    allowance_s: float | None
    steps_written: int
    entries_written: int
    dropped: int
    lost: int


@dataclass(frozen=True)
class Step:
    """One finished inner step of one rank."""

    number: int
    outer_step: int | None
    inner_step: int | None
    total_steps: int
    start: float
    end: float
    wall: float
    loss: float | None
    """None where it was not given; NaN and infinities are kept."""

    lr: float | None
    grad_norm: float | None
    """None where it was not given; NaN and infinities are kept."""

    eval_loss: float | None
    """The same. Of the model as it was before this step ended."""

    allocated_bytes: float | None
    reserved_bytes: float | None
    tokens: int | None
    flags: int
    phases: Mapping[str, float]
    """Seconds by phase, those that occurred."""

    nested_in_monitor_s: float

    @property
    def seconds(self) -> float:
        """Duration of the inner step."""
        return self.end - self.start


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
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(draft, "w+b") as file:
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
        payload = json.dumps(document, separators=(",", ":"), default=in_words).encode()
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


class FlightReader:
    """Anybody's side: the supervisor while the rank lives, or a person long after."""

    def __init__(self, path: Path, *, acknowledge: bool = False) -> None:
        """Raises OSError or BadFlight. `acknowledge` opens it writable, for the supervisor alone."""
        self.path = path
        with open(path, "r+b" if acknowledge else "rb") as file:
            if os.fstat(file.fileno()).st_size != layout.FILE_SIZE:
                raise BadFlight(f"{path}: {os.fstat(file.fileno()).st_size} bytes, expected {layout.FILE_SIZE}")
            access = mmap.ACCESS_WRITE if acknowledge else mmap.ACCESS_READ
            self._map = mmap.mmap(file.fileno(), layout.FILE_SIZE, access=access)
        self.identity = self._read_identity()

    def _read_identity(self) -> Identity:
        magic, version, pid, rank, local_rank, world_size, start, run_id, opened, of_host = layout.IDENTITY.unpack_from(
            self._map, layout.IDENTITY_OFFSET
        )
        if magic != layout.MAGIC or version != layout.VERSION:
            self._map.close()
            raise BadFlight(f"{self.path}: not a flight record of version {layout.VERSION}")
        run = run_id.rstrip(b"\0").decode(errors="replace")
        return Identity(pid, rank, local_rank, world_size, start, run, opened, of_host)

    def whole(self) -> bool:
        """Whether the file is as long as it was: who reads past the end of a mapped one is killed by SIGBUS."""
        return self._map.size() == layout.FILE_SIZE

    def now(self) -> Now | None:
        """The header, or None while the rank has written none, or is writing it without pause."""
        for _ in range(50):
            values = layout.NOW.unpack_from(self._map, layout.NOW_OFFSET)
            after = layout.ACK.unpack_from(self._map, layout.NOW_OFFSET)[0]
            if values[0] == after and values[0] % 2 == 0:
                return _now(values) if values[0] else None
        return None

    def step(self, number: int) -> Step | None:
        """Step record `number`, or None where it is torn, overwritten or not yet there."""
        values = layout.STEP.unpack_from(self._map, layout.step_offset(number))
        if values[0] != number + 1 or values[15] != layout.check_of(number, values[2], values[5]):
            return None
        return _step(number, values)

    def steps(self, since: int = 0) -> Iterator[Step]:
        """All readable step records from number `since`, oldest first."""
        written, *_ = self._counts()
        for number in range(max(since, written - layout.RING_SLOTS), written):
            step = self.step(number)
            if step is not None:
                yield step

    def entries(self, since: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        """Journal entries from number `since` as (number, document); torn ones are left out."""
        _, written, *_ = self._counts()
        for number in range(max(since, written - layout.JOURNAL_SLOTS), written):
            document = self._entry(number)
            if document is not None:
                yield number, document

    def _counts(self) -> tuple[int, ...]:
        """As they stand, also under a lock that a killed rank has left behind: each record proves itself."""
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

    def acknowledged(self) -> int:
        """Entries acknowledged so far, by this or an earlier supervisor."""
        count: int = layout.ACK.unpack_from(self._map, layout.ACK_OFFSET)[0]
        return count

    def request_checkpoint(self) -> None:
        """Ask the rank for one checkpoint more; only the supervisor's reader may (`acknowledge=True`)."""
        asked: int = layout.REQUESTS.unpack_from(self._map, layout.REQUESTS_OFFSET)[0]
        layout.REQUESTS.pack_into(self._map, layout.REQUESTS_OFFSET, asked + 1)

    def close(self) -> None:
        """Unmap."""
        self._map.close()


def _now(v: tuple[Any, ...]) -> Now:
    state = layout.STATES[v[1]] if v[1] < len(layout.STATES) else "unknown"
    return Now(
        state, v[2].rstrip(b"\0").decode(errors="replace"), v[3], v[4], known_count(v[5]), known_count(v[6]),
        max(v[7], 0), known(v[8]), known(v[9]), known(v[10]), known(v[11]), v[12], v[13], v[14], v[15],
    )  # fmt: skip


def _step(number: int, v: tuple[Any, ...]) -> Step:
    flags = v[14]
    columns = v[16 : 16 + len(layout.PHASES)]
    return Step(
        number, known_count(v[1]), known_count(v[2]), v[3], v[4], v[5], v[6],
        v[7] if flags & FLAG_LOSS_GIVEN else None, known(v[8]), v[9] if flags & FLAG_GRAD_NORM_GIVEN else known(v[9]),
        v[10] if flags & FLAG_EVAL_LOSS_GIVEN else None, known(v[11]), known(v[12]), known_count(v[13]), flags,
        {name: seconds for name, seconds in zip(layout.PHASES, columns, strict=True) if seconds > 0},
        v[16 + len(layout.PHASES)],
    )  # fmt: skip
