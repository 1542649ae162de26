"""Checks the node's shared memory, limits and disks, and the subnet's minimum compute.

`python -m miner_guard.checks.host` reads the node's facts in a child process, so that a dead
network file system cannot hang the guard.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from miner_guard.checks.check import Check, Snapshot, gib, judged
from miner_guard.checks.health import existing, read_cgroup_memory
from miner_guard.record.words import gb
from miner_guard.system import probe

NOFILE = 4096
"""Below this, dataloaders and NCCL run out of file descriptors; distributions default to 1024 per
login."""

MEMLOCK_BYTES = 64 * 1024**2
"""RDMA and pinned memory need more than the old default of 64 KiB; systemd's is 64 MiB."""


SHM_MIN_GB = 1.0
"""NCCL and data loaders fail in a smaller /dev/shm, such as Docker's 64 MB."""


def host_checks(s: Snapshot) -> Iterator[Check]:
    """Check shared memory, limits and disks."""
    if s.host is None:
        step = "run miner-guard doctor again"
        yield Check("host", "unknown", s.unread.get("host", "not read"), None, step)
        return
    yield _shm(s.host["shm_bytes"])
    yield from _limits(s, s.host["limits"])
    for path, free in s.host["disks"].items():
        yield _disk_space(path, free, s.config.health.disk_min_free_gb * 1024**3)


def _shm(size: int | None) -> Check:
    if size is None:
        step = "check that it is mounted"
        return Check("host.shm", "unknown", "/dev/shm could not be read", None, step)
    limit = SHM_MIN_GB * 1024**3
    level, reading = "warn" if size < limit else "ok", f"/dev/shm has {size / 1024**2:.0f} MB"
    step = "start the container with --shm-size=16g or --ipc=host"
    return judged("host.shm", level, reading, f"at least {gib(limit)}", step=step)


def _limits(s: Snapshot, limits: Mapping[str, int]) -> Iterator[Check]:
    for name, flag, minimum, unit in (
        ("nofile", "n", NOFILE, 1),
        ("memlock", "l", MEMLOCK_BYTES, 1024),
    ):
        if (value := limits.get(name)) is None:
            continue
        # A CPU run pins no memory.
        matters = name != "memlock" or s.expectation.expects_gpus
        level = "warn" if 0 <= value < minimum and matters else "ok"
        reading = "unlimited" if value < 0 else f"{value // unit}" + (" KiB" if unit > 1 else "")
        step = f"raise it with ulimit -{flag}, limits.conf or docker --ulimit {name}=-1"
        limit = f"at least {minimum // unit}"
        yield judged(f"host.{name}", level, f"{name} is {reading}", limit, step=step)


def _disk_space(path: str, free: int | None, minimum: float) -> Check:
    if free is None:
        step = "check that its file system is mounted"
        return Check("host.disk", "unknown", f"{path} could not be read", None, step)
    level = "warn" if free < minimum else "ok"
    step = "free up some space: writing checkpoints and logs will fail"
    reading = f"{gib(free)} free at {path}"
    return judged("host.disk", level, reading, f"at least {gib(minimum)}", step=step)


def minimum_checks(s: Snapshot) -> Iterator[Check]:
    """Warn of a network that pays nobody, and compare this host with the minimum; empty without a
    profile. A shortfall is a warning: the subnet accepts every miner, but one below the minimum
    earns nothing."""
    if s.network is not None:
        advice = "the guard still watches training, but nothing that is published earns"
        yield Check("network", "warn", s.network, "alive", advice)
    if s.clone is not None:
        words, since = s.clone
        step = (
            "the validators' rules may have changed: `python -m miner_guard.validators.compare "
            "CLONE` (subnet 38) shows how; elsewhere, compare [patterns] with its log"
        )
        level = "warn" if since else "ok"
        yield judged("network.clone", level, f"clone at {words}", "the profile's", step=step)
    host = s.host or {}
    memories = [row["memory_total_bytes"] for row in s.gpu_rows if row.get("memory_total_bytes")]
    gpus: float | None = (
        len(s.gpu_rows) if s.nvml is not None and s.nvml["state"] in ("ok", "absent") else None
    )
    for key, what, measured, unit in (
        ("min_gpus", "GPUs", gpus, ""),
        ("min_gpu_memory_gb", "memory of the smallest GPU", gb(min(memories, default=None)), " GB"),
        ("min_vcpus", "CPUs", host.get("cpus"), ""),
        ("min_memory_gb", "memory", gb(host.get("memory_bytes")), " GB"),
        ("min_disk_gb", "disk", gb(host.get("disk_bytes")), " GB"),
    ):
        minimum = s.compute.get(key)
        if minimum is None or (key == "min_gpu_memory_gb" and not s.expectation.expects_gpus):
            continue
        name = f"minimum.{key.removeprefix('min_').removesuffix('_gb')}"
        limit = f"{minimum:g}{unit}"
        if measured is None:
            by_hand = f"compare by hand: the subnet requires {limit}"
            yield Check(name, "unknown", f"{what} could not be read", limit, by_hand)
            continue
        # Vendors count in 10^9: an "80 GB" GPU has 79.6 GiB or less.
        level = "warn" if measured < minimum * (0.93 if unit else 1) else "ok"
        step = f"below the subnet's minimum of {limit}: expect to score last"
        yield judged(name, level, f"{what}: {measured:.0f}{unit}", limit, step=step)


def facts(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes in bytes and limits as the kernel reports them (-1: unlimited). Unreadable
    values are null."""
    paths = request["paths"]
    return {
        "shm_bytes": _disk("/dev/shm", "total"),
        "limits": {
            "nofile": _limit(resource.RLIMIT_NOFILE),
            "memlock": _limit(resource.RLIMIT_MEMLOCK),
        },
        "disks": {path: _disk(path, "free") for path in paths},
        "disk_bytes": max(filter(None, (_disk(path, "total") for path in paths)), default=None),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": _memory(),
    }


def _disk(path: str, what: str) -> int | None:
    """`free` or `total` bytes of the file system that holds the path, or would hold it."""
    with contextlib.suppress(OSError):
        return int(getattr(psutil.disk_usage(str(existing(Path(path).absolute()))), what))
    return None


def _limit(which: int) -> int:
    soft, _hard = resource.getrlimit(which)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _memory() -> int:
    total = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):
        return min(total, read_cgroup_memory()[0] or total)
    return total


if __name__ == "__main__":
    probe.reply(facts(probe.request()))
