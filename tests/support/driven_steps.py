"""Feeds one rank's steps to the monitor `steps` on its fake clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from miner_guard.rank.layout import StepRecord
from miner_guard.record.events import Event
from miner_guard.system.clock import FakeClock
from miner_guard.watch.steps import StepsMonitor


def make_step(number: int, start: float, seconds: float, **extra: Any) -> StepRecord:
    """A step record with `phases`; `extra` overrides any other field."""
    values: dict[str, Any] = {
        "outer_step": 5,
        "inner_step": number,
        "total_steps": number,
        "wall": 1e9,
        "loss": 3.0,
        "lr": 2.1e-5,
        "grad_norm": None,
        "eval_loss": None,
        "allocated_bytes": 18.45 * 1024**3,
        "reserved_bytes": None,
        "tokens": None,
        "flags": 0,
        "phases": {},
        "nested_in_monitor_s": 0.0,
    }
    return StepRecord(number=number, start=start, end=start + seconds, **{**values, **extra})


def drive(
    monitor: StepsMonitor, clock: FakeClock, durations: Iterable[float], **extra: Any
) -> list[Event]:
    """Feed steps one after the other on the monitor's clock."""
    seen: list[Event] = []
    first = monitor.snapshot()["total_steps"] or 0
    for number, seconds in enumerate(durations, first + 1):
        step = make_step(number, clock.monotonic(), seconds, **extra)
        clock.advance(seconds)
        seen += monitor.on_steps(0, [step])
    return seen


def lines(found: Iterable[Event], event: str) -> list[str]:
    return [f.text for f in found if f.name == event]
