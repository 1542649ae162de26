"""Snapshots for the startup checks: a healthy node, with the changes that a test makes to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from miner_guard.checks.check import Check, Expectation, Snapshot
from miner_guard.config import Config

GIB = 1024**3
FOUR = Expectation(4, "[gpu] expect")

HEALTHY_HOST: dict[str, Any] = {
    "shm_bytes": 16 * GIB,
    "limits": {"nofile": 65536, "memlock": -1},
    "disks": {"/": 100 * GIB},
    "disk_bytes": 2000 * GIB,
    "cpus": 64,
    "memory_bytes": 400 * GIB,
}

PACKAGES: dict[str, Any] = {
    "python": "3.11.7",
    "executable": "/usr/bin/python3",
    "miner_guard": True,
}


def snapshot(**changes: Any) -> Snapshot:
    base: dict[str, Any] = {"config": Config(), "expectation": FOUR, "host": HEALTHY_HOST}
    return Snapshot(**{**base, **changes})


def by_name(checks: Iterator[Check]) -> dict[str, Check]:
    return {c.check: c for c in checks}


def nvml(count: int) -> dict[str, Any]:
    row = {"state": "ok", "name": "A100", "unread": {}, "uuid": None, "error": None}
    rows = [{**row, "index": i} for i in range(count)]
    return {
        "state": "ok",
        "driver": "550",
        "cuda_driver": "12.4",
        "count": count,
        "gpus": rows,
        "reason": None,
    }


def healthy(count: int = 4, **changes: Any) -> Snapshot:
    torch = {
        "torch_version": "2.5.1",
        "cuda_version": "12.4",
        "cuda_available": True,
        "gpu_count": count,
    }
    return snapshot(nvml=nvml(count), torch=torch, packages=PACKAGES, **changes)
