"""The flight record's contents and their binary layout: one file per rank, written by the rank,
readable by any process.

    header    1 page: what the rank is doing now, guarded by a sequence lock
    ring      4096 step records
    journal   64 slots of JSON: decisions, uploads, diagnosis, messages; kept until acknowledged

All numbers are little endian. Times are CLOCK_MONOTONIC in seconds, which all processes on a host
share; `wall` is seconds since 1970. An unknown value is None to readers and writers; in the file an
unknown number is NaN, an unknown count -1.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmap import mmap

from miner_guard.record.phases import PHASES
from miner_guard.record.words import gb
from miner_guard.state_dir import json_number

NAN = math.nan

MAGIC = b"MGFLIGHT"
VERSION = 2
"""Version 2 added the evaluation loss to the step record."""

HEADER_SIZE = 4096
RING_SLOTS = 4096
STEP_SIZE = 256
JOURNAL_SLOTS = 64
SLOT_SIZE = 4096

RING_OFFSET = HEADER_SIZE
JOURNAL_OFFSET = RING_OFFSET + RING_SLOTS * STEP_SIZE
FILE_SIZE = JOURNAL_OFFSET + JOURNAL_SLOTS * SLOT_SIZE

IDENTITY = struct.Struct("<8sIIiiiq16sdi")
"""magic, version, pid, rank, local_rank, world_size, process start (clock ticks since boot), run
id, opened (wall), local world size (0: unknown)."""
IDENTITY_OFFSET = 0

ACK = struct.Struct("<Q")
"""Number of journal entries that the supervisor has stored. The supervisor writes it."""
ACK_OFFSET = 128

REQUESTS = struct.Struct("<Q")
"""Number of checkpoints that the supervisor has asked for. The supervisor writes it."""
REQUESTS_OFFSET = 136

ATTACHED = struct.Struct("<Q")
"""The supervisor's pid, written when the supervisor opens the record; zero until then."""
ATTACHED_OFFSET = 144

NOW = struct.Struct("<QB7x24sddqqqddddQQQQ48sd")
"""sequence lock (odd: being written), state, phase, phase since, heartbeat, outer step, inner step,
total steps, loss, lr, allocated bytes, the phase's allowance (s; NaN: the default), steps written,
journal entries written, datagrams dropped, journal entries lost, open monitoring operation, its
start."""
NOW_OFFSET = 192

PHASE = struct.Struct("<24sdd")
"""The fields of NOW that change with the phase: name, start, heartbeat."""
PHASE_OFFSET = NOW_OFFSET + 16

COUNTS = struct.Struct("<QQQQ")
"""The counters in NOW: steps written, journal entries written, datagrams dropped, journal entries
lost."""
COUNTS_OFFSET = NOW_OFFSET + 112

OPERATION = struct.Struct("<48sd")
"""The fields of NOW for the outermost open monitoring operation: name (empty: none), start."""
OPERATION_OFFSET = NOW_OFFSET + 144

LOCK, STATE, SINCE, ALLOWANCE, STEPS, ENTRIES, DROPPED, LOST = 0, 1, 5, 13, 14, 15, 16, 17
"""Offsets into NOW, in 8-byte words, of the fields that the writer updates individually, without
packing the rest."""

STEPPED = struct.Struct("<dqqqddd")
"""The fields of NOW that change with each step: heartbeat, outer step, inner step, total steps,
loss, lr, allocated."""
STEPPED_OFFSET = NOW_OFFSET + 48

STEP = struct.Struct("<QqqqdddddddddqII" + f"{len(PHASES)}f" + "f")
"""sequence number + 1, outer step, inner step, total steps, start (monotonic), end (monotonic), end
(wall), loss, lr, grad norm, evaluation loss, allocated bytes, reserved bytes, tokens, flags, check,
seconds per phase (including the phases nested in it), seconds of the phases nested in `monitor`."""

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

SLOT = struct.Struct("<QII")
"""sequence number + 1, length of the JSON that follows, its crc32."""
SLOT_PAYLOAD = SLOT_SIZE - SLOT.size

STATES = ("starting", "running", "closed", "finished", "ended", "failed")
"""`closed`: the miner closed the hook without reporting that it finished; `finished`: it called
`close(finished=True)`; `ended`: the process exited normally without closing the hook; `failed`: it
exited with an uncaught exception."""

ENDED_STATES = frozenset(STATES[2:])
"""States in which the rank has stopped training."""


def known(number: float) -> float | None:
    """Convert a number from the file: None if it is unknown (NaN)."""
    return None if number != number else number


def known_count(count: int) -> int | None:
    """Convert a count from the file: None if it is unknown (negative)."""
    return None if count < 0 else count


_MAX_TIME_S = 1e12
"""Sanity bound: about 30,000 years of uptime."""


def is_time(value: float) -> bool:
    """Return whether the value can be a monotonic time; False for NaN and infinities."""
    return 0.0 <= value < _MAX_TIME_S


def step_offset(number: int) -> int:
    return RING_OFFSET + (number % RING_SLOTS) * STEP_SIZE


def slot_offset(number: int) -> int:
    return JOURNAL_OFFSET + (number % JOURNAL_SLOTS) * SLOT_SIZE


def check_of(number: int, inner_step: int, end: float) -> int:
    """Compute the check word at the end of a step record; a reader uses it to detect a torn
    write."""
    return (number * 2654435761 ^ (inner_step & 0xFFFFFFFF) ^ int(end * 1000)) & 0xFFFFFFFF


assert STEP.size <= STEP_SIZE
assert IDENTITY.size <= ACK_OFFSET
assert NOW_OFFSET + 8 * SINCE == PHASE_OFFSET + 24
assert STEPPED_OFFSET + STEPPED.size == NOW_OFFSET + 8 * ALLOWANCE
assert NOW_OFFSET + 8 * STEPS == COUNTS_OFFSET
assert ACK_OFFSET + ACK.size <= REQUESTS_OFFSET
assert REQUESTS_OFFSET + REQUESTS.size <= ATTACHED_OFFSET
assert ATTACHED_OFFSET + ATTACHED.size <= NOW_OFFSET
assert COUNTS_OFFSET + COUNTS.size == OPERATION_OFFSET
assert OPERATION_OFFSET + OPERATION.size == NOW_OFFSET + NOW.size <= HEADER_SIZE


_GIVEN = FLAG_LOSS_GIVEN | FLAG_GRAD_NORM_GIVEN | FLAG_EVAL_LOSS_GIVEN
_ZEROS = (0.0,) * len(PHASES)
_FIRST_PHASE = 16
"""Index of the first phase's column among the values of `STEP`."""


@dataclass(frozen=True)
class Identity:
    pid: int
    rank: int
    local_rank: int
    world_size: int
    process_start: int
    """Clock ticks since boot (field 22 of /proc/PID/stat); distinguishes the process from a later
    one with the same pid."""

    run_id: str
    opened: float
    """Wall time, seconds since 1970."""

    local_world_size: int
    """Number of ranks on this host; 0 if unknown."""

    def pack_into(self, buffer: mmap) -> None:
        IDENTITY.pack_into(
            buffer,
            IDENTITY_OFFSET,
            MAGIC,
            VERSION,
            self.pid,
            self.rank,
            self.local_rank,
            self.world_size,
            self.process_start,
            self.run_id.encode()[:16],
            self.opened,
            self.local_world_size,
        )

    @classmethod
    def unpack_from(cls, buffer: mmap | bytearray) -> Identity | None:
        """The record's identity, or None if the file is not a flight record of this version."""
        magic, version, *values = IDENTITY.unpack_from(buffer, IDENTITY_OFFSET)
        if magic != MAGIC or version != VERSION:
            return None
        pid, rank, local_rank, world_size, start, run_id, opened, local_world_size = values
        run = run_id.rstrip(b"\0").decode(errors="replace")
        return cls(pid, rank, local_rank, world_size, start, run, opened, local_world_size)


def ranks_elsewhere(identities: Iterable[Identity]) -> int:
    """Return the number of ranks on other nodes; 0 if the launcher did not set the local world
    size."""
    informed = (one for one in identities if one.local_world_size)
    return max((one.world_size - one.local_world_size for one in informed), default=0)


@dataclass(frozen=True)
class Now:
    """The rank's current activity, from the header of its flight record."""

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
    entries_written: int
    dropped: int
    """Datagrams to the supervisor that did not arrive."""

    lost: int
    """Journal entries that were dropped for lack of room."""

    operation: str = ""
    """Name of the outermost open monitoring operation of the training thread (`tracker.track`,
    `guard.track`); empty if none is open."""

    operation_since: float | None = None
    """Monotonic time at which the operation began; None if none is open."""

    @classmethod
    def unpack_from(cls, buffer: mmap | bytearray) -> Now | None:
        """The header; None if the rank has not written one yet, or is in the middle of writing it
        (in that case, try again)."""
        values = NOW.unpack_from(buffer, NOW_OFFSET)
        after = ACK.unpack_from(buffer, NOW_OFFSET)[0]
        (
            lock,
            state,
            phase,
            since,
            heartbeat,
            outer,
            inner,
            total,
            loss,
            lr,
            allocated,
            allowance,
            steps,
            entries,
            dropped,
            lost,
            operation,
            operation_since,
        ) = values
        if lock != after or lock % 2 or not lock:
            return None
        return cls(
            STATES[state] if state < len(STATES) else "unknown",
            phase.rstrip(b"\0").decode(errors="replace"),
            since,
            heartbeat,
            known_count(outer),
            known_count(inner),
            max(total, 0),
            known(loss),
            known(lr),
            known(allocated),
            known(allowance),
            steps,
            entries,
            dropped,
            lost,
            operation.rstrip(b"\0").decode(errors="replace"),
            operation_since if operation[0] else None,
        )


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One finished inner step of one rank.

    A rank reuses one record for all steps; it holds the values that the training loop reports and
    the hook's measurements. Readers get a new record for each step.
    """

    number: int = 0
    """Sequence number in this flight record, from 0."""

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
    loss lag. `pack_into` adds the flags for the values that were reported."""

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

    def pack_into(self, buffer: mmap) -> None:
        number, end, phases = self.number, self.end, self.phases
        loss, norm, evaluated = self.loss, self.grad_norm, self.eval_loss
        lr, allocated, reserved = self.lr, self.allocated_bytes, self.reserved_bytes
        outer, inner, total, tokens = (
            self.outer_step,
            self.inner_step,
            self.total_steps,
            self.tokens,
        )
        flags = self.flags
        if loss is not None:
            flags |= FLAG_LOSS_GIVEN
        if norm is not None:
            flags |= FLAG_GRAD_NORM_GIVEN
        if evaluated is not None:
            flags |= FLAG_EVAL_LOSS_GIVEN
        inner = -1 if inner is None else inner
        STEP.pack_into(
            buffer,
            step_offset(number),
            number + 1,
            -1 if outer is None else outer,
            inner,
            total,
            self.start,
            end,
            self.wall,
            NAN if loss is None else loss,
            NAN if lr is None else lr,
            NAN if norm is None else norm,
            NAN if evaluated is None else evaluated,
            NAN if allocated is None else allocated,
            NAN if reserved is None else reserved,
            -1 if tokens is None else tokens,
            flags,
            check_of(number, inner, end),
            *(map(phases.get, PHASES, repeat(0.0)) if phases else _ZEROS),
            self.nested_in_monitor_s,
        )

    def show_in(self, buffer: mmap) -> None:
        outer, inner = self.outer_step, self.inner_step
        loss, lr, allocated = self.loss, self.lr, self.allocated_bytes
        STEPPED.pack_into(
            buffer,
            STEPPED_OFFSET,
            self.end,
            -1 if outer is None else outer,
            -1 if inner is None else inner,
            self.total_steps,
            NAN if loss is None else loss,
            NAN if lr is None else lr,
            NAN if allocated is None else allocated,
        )

    @classmethod
    def unpack_from(cls, buffer: mmap | bytearray, number: int) -> StepRecord | None:
        """Step record `number` (counting from 0); None if it is torn, overwritten or not written
        yet."""
        values = STEP.unpack_from(buffer, step_offset(number))
        sequence, outer, inner, total, start, end, wall, loss, lr, norm, evaluated, allocated = (
            values[:12]
        )
        reserved, tokens, flags, check = values[12:_FIRST_PHASE]
        if sequence != number + 1 or not (is_time(start) and is_time(end)):
            return None
        if check != check_of(number, inner, end):
            return None
        *columns, nested = values[_FIRST_PHASE:]
        return cls(
            number=number,
            outer_step=known_count(outer),
            inner_step=known_count(inner),
            total_steps=total,
            start=start,
            end=end,
            wall=wall,
            loss=loss if flags & FLAG_LOSS_GIVEN else None,
            lr=known(lr),
            # Older hooks wrote no such flag, and NaN for an unknown norm.
            grad_norm=norm if flags & FLAG_GRAD_NORM_GIVEN else known(norm),
            eval_loss=evaluated if flags & FLAG_EVAL_LOSS_GIVEN else None,
            allocated_bytes=known(allocated),
            reserved_bytes=known(reserved),
            tokens=known_count(tokens),
            flags=flags & ~_GIVEN,
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
