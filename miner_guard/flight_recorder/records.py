"""What a flight record holds, as both sides see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miner_guard.flight_recorder import layout


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

    @property
    def loss_lag(self) -> int:
        """How many steps ago the step was whose loss this is; 0: its own."""
        return self.flags >> layout.LOSS_LAG_SHIFT & layout.MAX_LOSS_LAG

    @property
    def loss_summed(self) -> bool:
        """The loss is the sum of what was passed to `backward`; the program may show another number."""
        return bool(self.flags & layout.FLAG_LOSS_SUMMED)


def json_default(value: Any) -> str:
    """What JSON cannot express, as text; a tensor on a GPU without its value, which would synchronise."""
    device = getattr(getattr(value, "device", None), "type", "cpu")
    return str(value) if device == "cpu" else f"{type(value).__name__} on {device}"
