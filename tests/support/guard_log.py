"""Lets a test write a guard's log and status, to test the readers of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miner_guard.record.emitter import Emitter, StoreSink
from miner_guard.record.events import event
from miner_guard.record.redaction import Redactor
from miner_guard.record.store import RunStore
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import FakeClock
from tests.support.event_names import events


class Log:
    """Writes a state directory as a guard would."""

    def __init__(self, root: Path) -> None:
        self.state, self.clock = StateDir(root), FakeClock()
        store = RunStore(self.state.db)
        sink = StoreSink(lambda *row: store.write(row))
        self.emit = Emitter(self.clock, "r1", Redactor(), [sink]).emit

    def say(self, name: str, level: str | None = None, **fields: Any) -> None:
        level = level or next((e.level for e in events()[name] if e.level), "info")
        told = ", ".join(v for v in fields.values() if isinstance(v, str))
        text = f"{name.replace('_', ' ').upper()}: {told}"
        self.emit(event(name, level, text, **fields))

    def step(self, inner_step: int, seconds: float = 15.0, loss: float = 3.0) -> None:
        self.clock.advance(seconds)
        self.say(
            "inner_step",
            outer_step=1,
            inner_step=inner_step,
            lr=1e-4,
            loss=loss,
            step_time_s=seconds,
            gpu_mem_gb=18.4,
        )

    def snapshot(self, age: float) -> None:
        gpus = {"gpus": [{"memory_used_bytes": 18 * 1024**3, "utilization_ratio": 0.9}]}
        document = {
            "uploads": {"repo": {"age_s": age}},
            "miner": {"goodput": 0.9},
            "costs": {"share_pct": 0.1},
            "gpus": gpus,
        }
        self.say("health_snapshot", summary="x", snapshot=document)
