"""A rank's record in shared memory: its contents, their binary layout, the rank's writer and the
guard's reader.

The record is a memfd with a sealed size: if it were a mapped file, SIGBUS would kill the rank if
something truncated the file, and the rank would stall whenever the disk did. The rank hands the
descriptor to the guard (`rank.wire`), so the memory outlives the rank.

    header    1 page: what the guard has read, and what the rank is doing now (a sequence lock)
    ring      4096 step records
    journal   1 MiB, a ring of JSON lines: decisions, uploads, diagnosis, messages

The guard writes the first words of the header, the rank everything else. All numbers are little
endian. Times are CLOCK_MONOTONIC in seconds, which all processes on a host share; `wall` is seconds
since 1970. An unknown value is None to readers and writers; in memory an unknown number is NaN, an
unknown count -1.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from miner_guard.record.events import PHASES
from miner_guard.record.words import gb
from miner_guard.state_dir import json_number

NAN = math.nan

VERSION = 5
"""A rank whose installed hook has another version is refused, in words."""

HEADER_SIZE = 4096
RING_SLOTS = 4096
STEP_SIZE = 192
JOURNAL_SIZE = 1 << 20

RING_OFFSET = HEADER_SIZE
JOURNAL_OFFSET = RING_OFFSET + RING_SLOTS * STEP_SIZE
MEMORY_SIZE = JOURNAL_OFFSET + JOURNAL_SIZE

STEPS_READ, BYTES_READ, REQUESTS = 0, 1, 2
"""Offsets into the memory, in 8-byte words, of what the guard writes: the number of step records
and of the journal's bytes that it has stored, and of the checkpoints that it has asked for."""

NOW = struct.Struct("<QB7x24sddqqqddddQQQ48sd")
"""sequence lock (odd: being written), state, phase, phase since, heartbeat, outer step, inner step,
total steps, loss, lr, allocated bytes, the phase's allowance (s; NaN: the default), steps written,
bytes of the journal written, journal entries lost, open monitoring operation, its start."""
NOW_OFFSET = 64

PHASE = struct.Struct("<24sdd")
"""The fields of NOW that change with the phase: name, start, heartbeat."""
PHASE_OFFSET = NOW_OFFSET + 16

COUNTS = struct.Struct("<QQ")
"""The counters in NOW: steps written, bytes of the journal written."""
COUNTS_OFFSET = NOW_OFFSET + 112

OPERATION = struct.Struct("<48sd")
"""The fields of NOW for the outermost open monitoring operation: name (empty: none), start."""
OPERATION_OFFSET = NOW_OFFSET + 136

TAKEN_UP = struct.Struct("<QQ")
"""1 + the requests for checkpoints that the training loop has learned of (0: it never looks for
them), and whether it has looked again since."""
TAKEN_UP_OFFSET = HEADER_SIZE - TAKEN_UP.size

LOCK, STATE, SINCE, ALLOWANCE, STEPS, BYTES, LOST = 0, 1, 5, 13, 14, 15, 16
"""Offsets into NOW, in 8-byte words, of the fields that the writer updates individually, without
packing the rest."""

STEPPED = struct.Struct("<dqqqddd")
"""The fields of NOW that change with each step: heartbeat, outer step, inner step, total steps,
loss, lr, allocated."""
STEPPED_OFFSET = NOW_OFFSET + 48

_STEP_FIELDS = {
    **dict.fromkeys(("outer_step", "inner_step", "total_steps"), "q"),
    **dict.fromkeys(("start", "end", "wall", "loss", "lr", "grad_norm", "eval_loss"), "d"),
    **dict.fromkeys(("allocated_bytes", "reserved_bytes"), "d"),
    "tokens": "q",
}
"""The fields of `StepRecord` between its number and its flags, and how they are packed."""

STEP = struct.Struct(f"<Q{''.join(_STEP_FIELDS.values())}I{len(PHASES)}ffQ")
"""sequence number + 1, the fields above, flags, seconds per phase (including the phases nested in
it), seconds of the phases nested in `monitor`, sequence number + 1 again."""

FLAG_EVAL = 1
"""Part of the step was spent in inference, val_loss, example_loss or monitor."""
FLAG_FIRST = 2
"""The first step of this process: it includes compilation and cold caches."""
FLAG_LOSS_ON_CPU = 4
"""The loss was a tensor on the CPU although CUDA was expected."""
FLAG_SYNC = 8
"""Part of the step was spent in upload, allreduce, load_state or pause."""
FLAG_LOSS_GIVEN = 1 << 16
"""The training loop reported a loss, so NaN means that the loss is NaN. Without the flag, NaN means
unknown."""
FLAG_GRAD_NORM_GIVEN = 1 << 17
"""The training loop reported a gradient norm; NaN means the same as for FLAG_LOSS_GIVEN."""
FLAG_EVAL_LOSS_GIVEN = 1 << 18
"""The training loop reported an evaluation loss; NaN means the same as for FLAG_LOSS_GIVEN."""
FLAG_LOSS_SUMMED = 1 << 19
"""The loss is the sum of all losses passed to `backward` during the step; the miner may display a
different number."""
LOSS_LAG_SHIFT, MAX_LOSS_LAG = 20, 15
"""Position and maximum of a four-bit field: how many steps ago the loss was computed."""

STATES = ("starting", "running", "closed", "finished", "ended", "failed")
"""`closed`: the miner closed the hook without reporting that it finished; `finished`: it called
`close(finished=True)`; `ended`: the process exited normally without closing the hook; `failed`: it
exited with an uncaught exception."""

ENDED_STATES = frozenset(STATES[2:])
"""States in which the rank has stopped training."""


def decoded(value: float) -> Any:
    """A count or number from the memory: None if it is unknown (negative, NaN)."""
    return None if value != value or (value < 0 and type(value) is int) else value


_MAX_TIME_S = 1e12
"""Sanity bound: about 30,000 years of uptime."""


def is_time(value: float) -> bool:
    """Return whether the value can be a monotonic time; False for NaN and infinities."""
    return 0.0 <= value < _MAX_TIME_S


def step_offset(number: int) -> int:
    return RING_OFFSET + (number % RING_SLOTS) * STEP_SIZE


assert STEP.size <= STEP_SIZE
assert NOW_OFFSET + 8 * SINCE == PHASE_OFFSET + 24
assert STEPPED_OFFSET + STEPPED.size == NOW_OFFSET + 8 * ALLOWANCE
assert NOW_OFFSET + 8 * STEPS == COUNTS_OFFSET
assert COUNTS_OFFSET + COUNTS.size + 8 == OPERATION_OFFSET
assert OPERATION_OFFSET + OPERATION.size == NOW_OFFSET + NOW.size <= TAKEN_UP_OFFSET


_GIVEN_FLAGS = {
    "loss": FLAG_LOSS_GIVEN,
    "grad_norm": FLAG_GRAD_NORM_GIVEN,
    "eval_loss": FLAG_EVAL_LOSS_GIVEN,
}
_GIVEN_MASK = sum(_GIVEN_FLAGS.values())
_INDEX = {name: index for index, name in enumerate(_STEP_FIELDS)}


@dataclass(frozen=True)
class Identity:
    """What a rank says about itself when it connects to the guard."""

    pid: int
    rank: int
    local_rank: int
    world_size: int
    process_start: int
    """Clock ticks since boot (field 22 of /proc/PID/stat); distinguishes the process from a later
    one with the same pid. 0 if unknown."""

    launch: int = 0
    """Which launch of the miner the rank belongs to, counting from 0."""

    local_world_size: int = 0
    """Number of ranks on this host; 0 if unknown."""

    daemonic: int = 0
    """1 if its parent ends it when the program ends, as a `multiprocessing.Pool` does with its
    workers."""

    generation: int = 0
    """How often torchrun has restarted its workers after a failure (TORCHELASTIC_RESTART_COUNT)."""

    def as_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Identity:
        """Raises KeyError, TypeError or ValueError for what is not an identity."""
        # A rank of an earlier version names no generation.
        document = {"generation": 0, **document}
        return cls(**{each.name: int(document[each.name]) for each in dataclasses.fields(cls)})


def ranks_elsewhere(identities: Iterable[Identity]) -> int:
    """Return the number of ranks on other nodes; 0 if the launcher did not set the local world
    size."""
    informed = (one for one in identities if one.local_world_size)
    return max((one.world_size - one.local_world_size for one in informed), default=0)


@dataclass(frozen=True)
class Now:
    """The rank's current activity, from the header of its record."""

    state: str
    """One of `STATES`."""

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
    """How long the phase may last; None if the limit from the settings applies."""

    steps_written: int
    lost: int = 0
    """Journal entries that were dropped for lack of room."""

    operation: str = ""
    """Name of the outermost open monitoring operation of the training thread (`tracker.track`,
    `guard.track`); empty if none is open."""

    operation_since: float | None = None
    """Monotonic time at which the operation began; None if none is open."""

    @classmethod
    def unpack_from(cls, buffer: mmap.mmap) -> Now | None:
        """The header; None if the rank has not written one yet, or is in the middle of writing it
        (in that case, try again)."""
        values = NOW.unpack_from(buffer, NOW_OFFSET)
        (after,) = struct.unpack_from("<Q", buffer, NOW_OFFSET)
        lock, state, phase, since, heartbeat, outer, inner, total, loss, lr = values[:10]
        allocated, allowance, steps, _, lost, operation, operation_since = values[10:]
        if lock != after or lock % 2 or not lock:
            return None
        return cls(
            STATES[state] if state < len(STATES) else "unknown",
            phase.rstrip(b"\0").decode(errors="replace"),
            since,
            heartbeat,
            decoded(outer),
            decoded(inner),
            max(total, 0),
            decoded(loss),
            decoded(lr),
            decoded(allocated),
            decoded(allowance),
            steps,
            lost,
            operation.rstrip(b"\0").decode(errors="replace"),
            operation_since if operation[0] else None,
        )


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One finished inner step of one rank."""

    number: int = 0
    """Sequence number in this record, from 0."""

    outer_step: int | None = None
    inner_step: int | None = None
    total_steps: int = 0
    """Number of steps so far. If the training loop passes none, the hook counts the steps of this
    process; -1 if the loop passed an invalid number."""

    start: float = 0.0
    """Monotonic time, in seconds."""

    end: float = 0.0
    """Monotonic time, in seconds."""

    wall: float = 0.0
    """Wall time at which the step ended, in seconds since 1970."""

    loss: float | None = None
    """None if the training loop did not report it; may be NaN or infinite."""

    lr: float | None = None
    grad_norm: float | None = None
    """None if the training loop did not report it; may be NaN or infinite."""

    eval_loss: float | None = None
    """Loss on held-out data, from an evaluation before this step ended. None if the training loop
    did not report it; may be NaN or infinite."""

    allocated_bytes: float | None = None
    reserved_bytes: float | None = None
    tokens: int | None = None
    flags: int = 0
    """`FLAG_EVAL`, `FLAG_FIRST`, `FLAG_LOSS_ON_CPU`, `FLAG_SYNC`, `FLAG_LOSS_SUMMED` and the
    loss lag; not those for the values that were reported."""

    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase (`PHASES`), for the phases that occurred; each includes the phases
    nested in it."""

    nested_in_monitor_s: float = 0.0
    """Seconds spent in phases nested directly in `monitor`."""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def loss_lag(self) -> int:
        """How many steps ago the loss was computed; 0 means in this step."""
        return self.flags >> LOSS_LAG_SHIFT & MAX_LOSS_LAG

    @property
    def loss_summed(self) -> bool:
        """Whether the loss is the sum of all losses passed to `backward`; the miner may display a
        different number."""
        return bool(self.flags & FLAG_LOSS_SUMMED)

    def figures(self) -> dict[str, Any]:
        """The fields of an `inner_step` event that its line shows."""
        return {
            "outer_step": self.outer_step,
            "inner_step": self.inner_step,
            "lr": self.lr,
            "loss": json_number(self.loss),
            "step_time_s": self.seconds,
            "gpu_mem_gb": gb(self.allocated_bytes),
        }

    def packed(self) -> tuple[float, ...]:
        """The values of `STEP` between the two sequence numbers."""
        given = (self.loss, self.grad_norm, self.eval_loss)
        flags = self.flags
        for value, flag in zip(given, _GIVEN_FLAGS.values(), strict=True):
            flags |= flag * (value is not None)
        return (
            *(-1 if n is None else n for n in (self.outer_step, self.inner_step)),
            *(self.total_steps, self.start, self.end, self.wall),
            *(NAN if x is None else x for x in (self.loss, self.lr, self.grad_norm)),
            *(NAN if x is None else x for x in (self.eval_loss, self.allocated_bytes)),
            NAN if self.reserved_bytes is None else self.reserved_bytes,
            -1 if self.tokens is None else self.tokens,
            flags,
            *(self.phases.get(name, 0.0) for name in PHASES),
            self.nested_in_monitor_s,
        )

    @classmethod
    def unpack_from(cls, buffer: mmap.mmap, number: int) -> StepRecord | None:
        """Step record `number` (counting from 0); None if it is torn, overwritten or not written
        yet."""
        offset = step_offset(number)
        sequence, *values, check = STEP.unpack_from(buffer, offset)
        (after,) = struct.unpack_from("<Q", buffer, offset)
        fields = dict(zip(_STEP_FIELDS, map(decoded, values), strict=False))
        flags, *columns, nested = values[len(_STEP_FIELDS) :]
        if not sequence == check == after == number + 1:
            return None
        if not (is_time(values[3]) and is_time(values[4])):
            return None
        for name, flag in _GIVEN_FLAGS.items():
            # NaN is a value of these if the training loop reported one.
            fields[name] = values[_INDEX[name]] if flags & flag else None
        return cls(
            number=number,
            **{**fields, "total_steps": values[2]},
            flags=flags & ~_GIVEN_MASK,
            phases={
                name: seconds for name, seconds in zip(PHASES, columns, strict=True) if seconds > 0
            },
            nested_in_monitor_s=nested,
        )


def json_default(value: Any) -> str:
    """Return text for a value that JSON cannot express. The text for a GPU tensor has only its type
    and device, because reading its value would synchronise the GPU."""
    device = getattr(getattr(value, "device", None), "type", "cpu")
    return str(value) if device == "cpu" else f"{type(value).__name__} on {device}"


_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL, _SHRINK, _GROW = 1, 2, 4
"""Values from fcntl(2), because some builds of Python lack `fcntl.F_ADD_SEALS`."""

_RUNNING = STATES.index("running")


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
            os.posix_fallocate(self.memory, 0, MEMORY_SIZE)
            fcntl.fcntl(self.memory, _F_ADD_SEALS, _SEAL | _SHRINK | _GROW)
            self.map = mmap.mmap(self.memory, MEMORY_SIZE)
        except OSError:
            os.close(self.memory)
            raise
        STEPPED.pack_into(self.map, STEPPED_OFFSET, 0.0, -1, -1, 0, NAN, NAN, NAN)
        header = memoryview(self.map)[NOW_OFFSET : NOW_OFFSET + NOW.size]
        # Native byte order is the layout's little endian: torch on Linux runs on little-endian
        # machines only.
        self._words = header.cast("Q")
        self._reals = header.cast("d")
        self._by_guard = memoryview(self.map)[:NOW_OFFSET].cast("Q")
        # The lock is reentrant because a signal handler of the miner may close the guard in the
        # middle of a step.
        self._lock = threading.RLock()

    def show_state(self, state: str, now: float) -> None:
        """Write `state` (one of `STATES`) to the header, and clear the phase."""
        with self._lock:
            words = self._words
            words[LOCK] |= 1
            words[STATE] = STATES.index(state)
            PHASE.pack_into(self.map, PHASE_OFFSET, b"", now, now)
            self._reals[ALLOWANCE] = NAN
            words[LOCK] += 1

    def show_phase(self, name: bytes, since: float, heartbeat: float, allowance_s: float) -> None:
        """Write the innermost phase to the header. `name` has at most 24 bytes; `b""` means that no
        phase is open. If `allowance_s` is NaN, the default limit applies."""
        with self._lock:
            words = self._words
            words[LOCK] |= 1
            PHASE.pack_into(self.map, PHASE_OFFSET, name, since, heartbeat)
            self._reals[ALLOWANCE] = allowance_s
            words[LOCK] += 1

    def show_operation(self, name: bytes, since: float) -> None:
        """Write the open monitoring operation to the header; `b""` means that none is open."""
        with self._lock:
            words = self._words
            words[LOCK] |= 1
            OPERATION.pack_into(self.map, OPERATION_OFFSET, name[:48], since)
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
            words[LOST] += not fits
            words[LOCK] += 1
        return fits

    def room(self) -> int:
        """The journal's free bytes."""
        return JOURNAL_SIZE - (self._words[BYTES] - self._by_guard[BYTES_READ])

    def checkpoint_requests(self) -> int:
        """Return how many checkpoints the guard has asked for since the record was opened."""
        return self._by_guard[REQUESTS]

    def take_up(self, requests: int, *, again: bool) -> None:
        """Note that the training loop has learned of so many requests, just now or, if it looks
        `again`, before: then it has saved in between."""
        TAKEN_UP.pack_into(self.map, TAKEN_UP_OFFSET, requests + 1, again)

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
        if not sealed or os.fstat(memory).st_size != MEMORY_SIZE:
            raise OSError("not a record of this version")
        self.identity = identity
        self._map = mmap.mmap(memory, MEMORY_SIZE)
        self._by_guard = memoryview(self._map)[:NOW_OFFSET].cast("Q")

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
        return self._by_guard[STEPS_READ]

    @steps_read.setter
    def steps_read(self, count: int) -> None:
        self._by_guard[STEPS_READ] = count

    @property
    def bytes_read(self) -> int:
        """Number of bytes of the journal that the guard has stored."""
        return self._by_guard[BYTES_READ]

    @bytes_read.setter
    def bytes_read(self, count: int) -> None:
        self._by_guard[BYTES_READ] = count

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
        steps, written = COUNTS.unpack_from(self._map, COUNTS_OFFSET)
        return steps, written

    def request_checkpoint(self) -> None:
        """Ask the rank for one more checkpoint."""
        self._by_guard[REQUESTS] += 1

    def has_saved(self) -> bool | None:
        """Whether the rank has saved the checkpoint that it was asked for last; None if its
        training loop never looks for requests."""
        taken_up, again = TAKEN_UP.unpack_from(self._map, TAKEN_UP_OFFSET)
        if not taken_up:
            return None
        return bool(taken_up > self._by_guard[REQUESTS] and again)

    def close(self) -> None:
        self._by_guard.release()
        self._map.close()
