"""Checks the node's shared memory, limits, disks and ports, and the subnet's minimum compute.

`python -m miner_guard.checks.host` reads the node's facts in a child process, so that a dead
network file system cannot hang the guard.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from miner_guard.checks.check import Check, Snapshot, gib
from miner_guard.checks.health import existing, read_cgroup_memory
from miner_guard.incidents import xids
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
    """Check shared memory, limits, disks, ports and the kernel log."""
    if s.host is None:
        step = "run miner-guard doctor again"
        yield Check("host", "unknown", s.unread.get("host", "not read"), None, step)
        return
    yield from _shm(s.host)
    yield from _limits(s, s.host)
    yield from _disks(s, s.host)
    yield from _ports(s.host)
    yield from _xids(s.host)


def _shm(host: Mapping[str, Any]) -> Iterator[Check]:
    size = host["shm_bytes"]
    if size is None:
        yield Check(
            "host.shm", "unknown", "/dev/shm could not be read", None, "check that it is mounted"
        )
        return
    limit = SHM_MIN_GB * 1024**3
    step = "start the container with --shm-size=16g or --ipc=host" if size < limit else None
    seen = f"/dev/shm has {size / 1024**2:.0f} MB"
    yield Check("host.shm", "warn" if size < limit else "ok", seen, f"at least {gib(limit)}", step)


def _limits(s: Snapshot, host: Mapping[str, Any]) -> Iterator[Check]:
    for name, minimum, unit in (("nofile", NOFILE, 1), ("memlock", MEMLOCK_BYTES, 1024)):
        value = host["limits"].get(name)
        if value is None:
            continue
        low = 0 <= value < minimum
        # A CPU run pins no memory.
        warn = low and (name != "memlock" or s.expectation.expects_gpus)
        step = (
            f"raise it with ulimit -{'n' if name == 'nofile' else 'l'}, limits.conf or docker "
            f"--ulimit {name}=-1"
        )
        seen = "unlimited" if value < 0 else f"{value // unit}" + (" KiB" if unit > 1 else "")
        level = "warn" if warn else "ok"
        limit = f"at least {minimum // unit}"
        yield Check(f"host.{name}", level, f"{name} is {seen}", limit, step if warn else None)


def _disks(s: Snapshot, host: Mapping[str, Any]) -> Iterator[Check]:
    minimum = s.config.health.disk_min_free_gb * 1024**3
    for path, free in host["disks"].items():
        if free is None:
            seen = f"{path} could not be read"
            yield Check("host.disk", "unknown", seen, None, "check that its file system is mounted")
            continue
        low = free < minimum
        step = "free up some space: writing checkpoints and logs will fail" if low else None
        seen = f"{gib(free)} free at {path}"
        yield Check("host.disk", "warn" if low else "ok", seen, f"at least {gib(minimum)}", step)


def _ports(host: Mapping[str, Any]) -> Iterator[Check]:
    for port in host["ports"]:
        number, holder = port["port"], port.get("held_by")
        if port["free"] is None:
            seen = f"port {number} ({port['use']}): {port['error']}"
            yield Check("host.port", "unknown", seen, "free", "choose a port above 1023")
        elif port["free"]:
            yield Check("host.port", "ok", f"port {number} ({port['use']}) is free", "free")
        else:
            by = f" by {holder}" if holder else ""
            step = (
                f"find the process with `ss -ltnp sport = :{number}` (another miner or an "
                "orphan) and kill it, or choose another port"
            )
            seen = f"port {number} ({port['use']}) is in use{by}"
            yield Check("host.port", "critical", seen, "free", step, may_clear=True)


def _xids(host: Mapping[str, Any]) -> Iterator[Check]:
    """Report earlier Xids in the kernel log. A GPU that is still broken also fails other checks, so
    these rows are never critical."""
    for line in host.get("kernel_xids") or ():
        _, known = xids.of_line(line)
        if known is not None and known.level == "ok":
            continue
        step = "see NVIDIA's Xid catalogue" if known is None else known.action
        yield Check("gpu.kernel_log", "warn", f"the kernel log contains: {line}", "no Xid", step)


def minimum_checks(s: Snapshot) -> Iterator[Check]:
    """Warn of a network that pays nobody, and compare this host with the minimum; empty without a
    profile. A shortfall is a warning: the subnet accepts every miner, but one below the minimum
    earns nothing."""
    if s.network is not None:
        advice = "training is guarded all the same; nothing that is published earns"
        yield Check("network", "warn", s.network, "alive", advice)
    host = s.host or {}
    memories = [row["memory_total_bytes"] for row in s.gpu_rows if row.get("memory_total_bytes")]
    gpus: float | None = (
        len(s.gpu_rows) if s.nvml is not None and s.nvml["state"] in ("ok", "absent") else None
    )
    for key, what, seen, unit in (
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
        if seen is None:
            by_hand = f"compare by hand: the subnet requires {limit}"
            yield Check(name, "unknown", f"{what} could not be read", limit, by_hand)
            continue
        # Vendors count in 10^9: an "80 GB" GPU has 79.6 GiB or less.
        short = seen < minimum * (0.93 if unit else 1)
        step = f"below the subnet's minimum of {limit}: expect to score last" if short else None
        yield Check(name, "warn" if short else "ok", f"{what}: {seen:.0f}{unit}", limit, step)


_LAST_XIDS = 5


def facts(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes in bytes and limits as the kernel reports them (-1: unlimited). Unreadable
    values are null."""
    return {
        "shm_bytes": _disk("/dev/shm", "total"),
        "limits": {
            "nofile": _limit(resource.RLIMIT_NOFILE),
            "memlock": _limit(resource.RLIMIT_MEMLOCK),
        },
        "disks": {path: _disk(path, "free") for path in request["paths"]},
        "disk_bytes": max(
            filter(None, (_disk(path, "total") for path in request["paths"])), default=None
        ),
        "ports": [_port(entry["port"], entry["use"]) for entry in request["ports"]],
        "kernel_xids": _kernel_xids(),
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


def _port(number: int, use: str) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "port": number,
        "use": use,
        "free": True,
        "held_by": None,
        "error": None,
    }
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as candidate:
        # Set the option that servers set, so that a port whose last connection is in TIME_WAIT
        # counts as free.
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind(("", number))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            entry |= {
                "free": False if taken else None,
                "error": error.strerror,
                "held_by": _holder(number),
            }
    return entry


def _holder(number: int) -> str | None:
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.pid
            if listens and connection.laddr and connection.laddr.port == number:
                process = psutil.Process(connection.pid)
                return f"pid {process.pid} ({process.name()})"
    return None


def _kernel_xids() -> list[str] | None:
    """The last Xid lines of the kernel's ring buffer; None if this user lacks permission."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines: list[str] = []
    try:
        while record := os.read(fd, 8192):
            text = record.decode("utf-8", "replace").partition(";")[2].splitlines()[0]
            if "NVRM: Xid" in text:
                lines.append(text)
    except BlockingIOError:
        pass
    except OSError:
        return lines[-_LAST_XIDS:] or None
    finally:
        os.close(fd)
    return lines[-_LAST_XIDS:]


if __name__ == "__main__":
    probe.reply(facts(probe.request()))
