"""The flight record's binary layout: one file per rank, written by the rank, readable by any
process.

    header    1 page: what the rank is doing now, guarded by a sequence lock
    ring      4096 step records
    journal   64 slots of JSON: decisions, uploads, diagnosis, messages; kept until acknowledged

All numbers are little endian. Times are CLOCK_MONOTONIC in seconds, which all processes on a host
share; `wall` is seconds since 1970. An unknown number is NaN, never 0; an unknown count is -1.
"""

from __future__ import annotations

import math
import struct

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

PHASES = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "inference",
    "val_loss",
    "example_loss",
    "upload",
    "allreduce",
    "load_state",
    "pause",
    "monitor",
    "collective",
    "other",
)
"""Phases with their own column in a step record; the column `other` sums all others."""

SPECIAL_PHASES = ("inference", "val_loss", "upload", "allreduce", "load_state", "pause")
"""Detectors compare a step that contains one of these phases with similar steps, not with plain
training steps."""

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
    """Offset of step record `number` (counting from 0)."""
    return RING_OFFSET + (number % RING_SLOTS) * STEP_SIZE


def slot_offset(number: int) -> int:
    """Offset of journal entry `number` (counting from 0)."""
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
