"""The contents of a flight record as its writer and readers see them, and the conversion to and
from the file.

An unknown value is None here, and NaN, -1 or a missing flag in the file. Only this module converts
between the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any

from miner_guard.flight_recorder import layout
from miner_guard.flight_recorder.layout import (
    FLAG_EVAL_LOSS_GIVEN,
    FLAG_GRAD_NORM_GIVEN,
    FLAG_LOSS_GIVEN,
    NAN,
    PHASES,
    STEP,
    STEPPED,
    STEPPED_OFFSET,
    check_of,
    step_offset,
)

if TYPE_CHECKING:
    from mmap import mmap

_GIVEN = FLAG_LOSS_GIVEN | FLAG_GRAD_NORM_GIVEN | FLAG_EVAL_LOSS_GIVEN
_ZEROS = (0.0,) * len(PHASES)
_FIRST_PHASE = 16
"""Index of the first phase's column among the values of `layout.STEP`."""


@dataclass(frozen=True)
class Identity:
    """Identifies the process that a flight record belongs to."""

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
        """Write the identity to its place in the file."""
        layout.IDENTITY.pack_into(
            buffer,
            layout.IDENTITY_OFFSET,
            layout.MAGIC,
            layout.VERSION,
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
        magic, version, *values = layout.IDENTITY.unpack_from(buffer, layout.IDENTITY_OFFSET)
        if magic != layout.MAGIC or version != layout.VERSION:
            return None
        pid, rank, local_rank, world_size, start, run_id, opened, local_world_size = values
        run = run_id.rstrip(b"\0").decode(errors="replace")
        return cls(pid, rank, local_rank, world_size, start, run, opened, local_world_size)


def ranks_elsewhere(identities: Iterable[Identity]) -> int:
    """Return the number of ranks on other nodes; 0 if the launcher did not set the local world
    size."""
    known = (one for one in identities if one.local_world_size)
    return max((one.world_size - one.local_world_size for one in known), default=0)


@dataclass(frozen=True)
class Now:
    """The rank's current activity, from the header of its flight record."""

    state: str
    """One of `layout.STATES`."""

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
        values = layout.NOW.unpack_from(buffer, layout.NOW_OFFSET)
        after = layout.ACK.unpack_from(buffer, layout.NOW_OFFSET)[0]
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
            layout.STATES[state] if state < len(layout.STATES) else "unknown",
            phase.rstrip(b"\0").decode(errors="replace"),
            since,
            heartbeat,
            layout.known_count(outer),
            layout.known_count(inner),
            max(total, 0),
            layout.known(loss),
            layout.known(lr),
            layout.known(allocated),
            layout.known(allowance),
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
    """`layout.FLAG_EVAL`, `FLAG_FIRST`, `FLAG_LOSS_ON_CPU`, `FLAG_SYNC`, `FLAG_LOSS_SUMMED` and the
    loss lag. `pack_into` adds the flags for the values that were reported."""

    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase (`layout.PHASES`), for the phases that occurred; each includes the phases
    nested in it."""

    nested_in_monitor_s: float = 0.0
    """Seconds spent in phases nested directly in `monitor`."""

    @property
    def seconds(self) -> float:
        """Duration of the inner step."""
        return self.end - self.start

    @property
    def loss_lag(self) -> int:
        """How many steps ago the loss was computed; 0 means in this step."""
        return self.flags >> layout.LOSS_LAG_SHIFT & layout.MAX_LOSS_LAG

    @property
    def loss_summed(self) -> bool:
        """Whether the loss is the sum of all losses passed to `backward`; the miner may display a
        different number."""
        return bool(self.flags & layout.FLAG_LOSS_SUMMED)

    def pack_into(self, buffer: mmap) -> None:
        """Write the record to its place in the ring."""
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
        """Write this step into the header's last-step fields."""
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
        if sequence != number + 1 or not (layout.is_time(start) and layout.is_time(end)):
            return None
        if check != check_of(number, inner, end):
            return None
        *columns, nested = values[_FIRST_PHASE:]
        return cls(
            number=number,
            outer_step=layout.known_count(outer),
            inner_step=layout.known_count(inner),
            total_steps=total,
            start=start,
            end=end,
            wall=wall,
            loss=loss if flags & FLAG_LOSS_GIVEN else None,
            lr=layout.known(lr),
            # Older hooks wrote no such flag, and NaN for an unknown norm.
            grad_norm=norm if flags & FLAG_GRAD_NORM_GIVEN else layout.known(norm),
            eval_loss=evaluated if flags & FLAG_EVAL_LOSS_GIVEN else None,
            allocated_bytes=layout.known(allocated),
            reserved_bytes=layout.known(reserved),
            tokens=layout.known_count(tokens),
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
