"""Checks the node's shared memory, limits, disks and ports, and the subnet's minimum compute."""

from __future__ import annotations

from collections.abc import Iterator

from miner_guard.checks.check import Check, Snapshot, gib
from miner_guard.incidents import xids
from miner_guard.record.words import gb

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
    yield from _shm(s)
    yield from _limits(s)
    yield from _disks(s)
    yield from _ports(s)
    yield from _xids(s)


def _shm(s: Snapshot) -> Iterator[Check]:
    size = s.host["shm_bytes"] if s.host else None
    if size is None:
        yield Check(
            "host.shm", "unknown", "/dev/shm could not be read", None, "check that it is mounted"
        )
        return
    limit = SHM_MIN_GB * 1024**3
    step = "start the container with --shm-size=16g or --ipc=host" if size < limit else None
    seen = f"/dev/shm has {size / 1024**2:.0f} MB"
    yield Check("host.shm", "warn" if size < limit else "ok", seen, f"at least {gib(limit)}", step)


def _limits(s: Snapshot) -> Iterator[Check]:
    assert s.host is not None
    for name, minimum, unit in (("nofile", NOFILE, 1), ("memlock", MEMLOCK_BYTES, 1024)):
        value = s.host["limits"].get(name)
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


def _disks(s: Snapshot) -> Iterator[Check]:
    assert s.host is not None
    minimum = s.config.health.disk_min_free_gb * 1024**3
    for path, free in s.host["disks"].items():
        if free is None:
            seen = f"{path} could not be read"
            yield Check("host.disk", "unknown", seen, None, "check that its file system is mounted")
            continue
        low = free < minimum
        step = "free up some space: writing checkpoints and logs will fail" if low else None
        seen = f"{gib(free)} free at {path}"
        yield Check("host.disk", "warn" if low else "ok", seen, f"at least {gib(minimum)}", step)


def _ports(s: Snapshot) -> Iterator[Check]:
    assert s.host is not None
    for port in s.host["ports"]:
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


def _xids(s: Snapshot) -> Iterator[Check]:
    """Report earlier Xids in the kernel log. A GPU that is still broken also fails other checks, so
    these rows are never critical."""
    assert s.host is not None
    for line in s.host.get("kernel_xids") or ():
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
