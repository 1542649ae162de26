"""A simulated miner's training: its counters, and the reports of its ranks and GPUs."""

from __future__ import annotations

import math
import random
import socket
from typing import Any

from miner_guard.rank.layout import FLAG_FIRST, FLAG_LOSS_ON_CPU, StepRecord
from miner_guard.system.clock import FakeClock

_INNER_STEPS = 100
_GIB = 1024**3
_OWN = {"cpu_pct": 0.4, "memory_bytes": 58 * 2**20, "entries_lost": 0}
_NO_DRIVER = {"gpus": [], "state": "absent", "reason": "NVML Shared Library Not Found"}


class SimulatedTraining:
    """Ranks in lockstep, one GPU each; with `slow_rank` the others wait for that one."""

    def __init__(self, ranks: int, *, gpus: bool) -> None:
        self.ranks, self.gpus, self.random = ranks, gpus, random.Random(7)
        self.slow_rank: int | None = None
        self.total = self.inner = 0
        self.outer = self.network = 56
        self.first = True
        """Whether the next step is the first of its launch."""

    def step(self) -> None:
        """Count one more inner step, and an outer step after every hundred."""
        self.total += 1
        self.inner += 1
        if self.inner > _INNER_STEPS and self.network == self.outer:
            self.outer, self.network, self.inner = self.outer + 1, self.network + 1, 1

    @property
    def command(self) -> tuple[str, ...]:
        """The command line of the miner."""
        return ("torchrun", "--nproc_per_node", str(self.ranks), "miner.py")

    def usual_loss(self) -> float:
        """The loss of a healthy run."""
        return 2.6 + 2.4 * math.exp(-self.total / 900) + self.random.gauss(0, 0.03)

    def record(self, rank: int, seconds: float, loss: float, clock: FakeClock) -> StepRecord:
        """The record of the step that the rank is ending."""
        waits = 0.4 + 0.02 * self.random.random()
        backward = 0.6 * (seconds - waits)
        if self.slow_rank is not None:
            backward = 0.35 * seconds
            waits = 0.4 if rank == self.slow_rank else 0.42 * seconds
        forward = seconds - waits - backward - 0.1
        end = clock.monotonic()
        flags = (FLAG_FIRST if self.first else 0) | (0 if self.gpus else FLAG_LOSS_ON_CPU)
        return StepRecord(
            number=self.total,
            outer_step=self.outer,
            inner_step=self.inner,
            total_steps=self.total,
            start=end - seconds,
            end=end,
            wall=clock.wall(),
            loss=loss,
            lr=2.1e-5,
            allocated_bytes=18.4 * _GIB if self.gpus else 0.0,
            flags=flags,
            phases={"forward": forward, "backward": backward, "collective": waits},
        )

    def facts(self, rank: int) -> dict[str, Any]:
        """The rank's diagnosis report."""
        facts = {"rank": rank, "local_rank": rank, "host": socket.gethostname()}
        facts |= {"world_size": self.ranks, "pid": 4712 + rank, "cuda_available": self.gpus}
        if not self.gpus:
            return {**facts, "model_device": "cpu"}
        device = {"model_device": f"cuda:{rank}", "gpu_count": self.ranks}
        return {**facts, **device, "uuid": f"GPU-{rank}", "device_name": "NVIDIA A10G"}

    def health(self, *, idle: bool, disk_full: bool) -> dict[str, Any]:
        """The guard's measurements of GPUs, host and itself."""
        busy = dict.fromkeys(range(self.ranks), 0.97)
        if self.slow_rank is not None:
            busy |= {rank: 0.58 for rank in busy if rank != self.slow_rank}
        if idle:
            busy = dict.fromkeys(busy, 0.0)
        rows = [
            {
                "index": gpu,
                "uuid": f"GPU-{gpu}",
                "state": "ok",
                "memory_used_bytes": 18.4 * _GIB,
                "memory_total_bytes": 24 * _GIB,
                "utilization_ratio": busy[gpu],
                "temperature_c": 88.0 if gpu == self.slow_rank else 71.0,
                "power_w": 310.0,
            }
            for gpu in range(self.ranks)
        ]
        free = 0 if disk_full else 310 * _GIB
        host = {
            "cpu_pct": 41.0,
            "memory_used_bytes": 30 * _GIB,
            "memory_limit_bytes": 256 * _GIB,
            "disk_free_bytes": free,
            "disk_free_by_folder_bytes": {"state": free},
        }
        gpus = {"gpus": rows, "state": "ok", "reason": None} if self.gpus else _NO_DRIVER
        return {"gpus": gpus, "host": host, "guard": dict(_OWN)}


COSTS = {"share_pct": 0.21, "budget_pct": 5.0, "budget_status": "ok"}
"""The guard's cost, as its monitor reports it."""


def cost_ledger(steps: int) -> dict[str, Any]:
    """The ledger of operations after this many steps."""
    return {
        "operations": {
            "guard.hook": _cost(steps, 0.0003 * steps, 0.0),
            "guard.loop": _cost(steps, 0.0, 0.02 * steps),
            "validation": _cost(steps // 100 + 1, 0.9 * (steps // 100 + 1), 0.0),
        },
        "budget_status": COSTS["budget_status"],
        "total_percentage": COSTS["share_pct"],
        "budget_percentage": COSTS["budget_pct"],
    }


def _cost(calls: int, blocking_s: float, background_s: float) -> dict[str, Any]:
    return {
        "calls": calls,
        "total_time": blocking_s,
        "background_time": background_s,
        "percentage": blocking_s / 100,
        "impact": "negligible",
        "status": "active",
    }
