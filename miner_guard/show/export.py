"""Exports a run's numbers to TensorBoard or Weights & Biases. A separate process reads them from
run.db."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miner_guard.record.store import StoredEvent
from miner_guard.system.clock import parse_iso_utc

EVENTS = ("inner_step", "health_snapshot")
"""The exported events."""

_STEP = {
    "loss": "train/loss",
    "eval_loss": "eval/loss",
    "lr": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "step_time_s": "train/step_time_s",
    "gpu_mem_gb": "train/gpu_mem_gb",
    "outer_step": "train/outer_step",
    "inner_step": "train/inner_step",
}


@dataclass(frozen=True)
class Point:
    """Values at one point in time."""

    time: float
    step: int
    values: Mapping[str, float]


def points(events: Iterable[StoredEvent]) -> Iterator[Point]:
    """Yield one point per event that has numbers. Step numbers keep increasing across restarts of
    the miner."""
    step = 0
    for event in events:
        record, time = event.fields, parse_iso_utc(event.ts)
        if event.name == "inner_step":
            total = record.get("total_steps")
            step = max(step + 1, total) if isinstance(total, int) else step + 1
            values = _numbers((name, record.get(key)) for key, name in _STEP.items())
        else:
            values = _of_snapshot(record.get("snapshot") or {})
        if values:
            yield Point(time, step, values)


def _of_snapshot(snapshot: Mapping[str, Any]) -> dict[str, float]:
    repo = ((snapshot.get("uploads") or {}).get("repo") or {}).get("age_s")
    host, costs = snapshot.get("host") or {}, snapshot.get("costs") or {}
    rows = [
        ("guard/repo_age_s", repo),
        ("guard/goodput", (snapshot.get("miner") or {}).get("goodput")),
        ("guard/monitoring_pct", costs.get("share_pct")),
        ("host/cpu_pct", host.get("cpu_pct")),
        ("host/memory_used_bytes", host.get("memory_used_bytes")),
    ]
    for gpu in (snapshot.get("gpus") or {}).get("gpus") or ():
        for key in ("memory_used_bytes", "utilization_ratio", "temperature_c", "power_w"):
            rows.append((f"gpu{gpu.get('index')}/{key}", gpu.get(key)))
    return _numbers(rows)


def _numbers(rows: Iterable[tuple[str, Any]]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in rows
        if isinstance(value, (int, float)) and value - value == 0
    }


Write = Callable[[Point], None]


@contextmanager
def to_tensorboard(folder: Path) -> Iterator[Write]:
    """A function that writes a point to event files under `folder`. Raises ImportError if the
    `tensorboard` extra is missing, and OSError if `folder` can't be written."""
    from torch.utils.tensorboard import SummaryWriter

    def write(point: Point) -> None:
        for name, value in point.values.items():
            writer.add_scalar(name, value, point.step, point.time)

    with SummaryWriter(str(folder)) as writer:
        yield write


@contextmanager
def to_wandb(folder: Path, project: str, *, online: bool) -> Iterator[Write]:
    """A function that logs a point to Weights & Biases (or, if not `online`, just to files under
    `folder`). Raises ImportError if the `wandb` extra is missing."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    quiet = wandb.Settings(silent=True, console="off")
    run = wandb.init(
        project=project, dir=str(folder), mode="online" if online else "offline", settings=quiet
    )
    try:
        yield lambda point: run.log({**point.values, "time": point.time}, step=point.step)
    finally:
        run.finish()
        # wandb's own process still writes after that: only its exit proves that all data is stored.
        wandb.teardown()
