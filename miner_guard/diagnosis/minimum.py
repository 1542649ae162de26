"""Checks the host against the subnet's minimum compute, from its profile."""

from __future__ import annotations

from collections.abc import Iterator

from miner_guard.diagnosis.check import Check, Snapshot
from miner_guard.record.words import gb


def checks(s: Snapshot) -> Iterator[Check]:
    """Compare this host with the minimum; empty without a profile. A shortfall is a warning: the
    subnet accepts every miner, but one below the minimum earns nothing."""
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
