"""Looks in an NVML sample for causes of slow steps: throttled clocks, low power draw, or unused
GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miner_guard.record.words import counted

_ORDINARY = frozenset(
    {"idle", "applications clocks", "display clocks", "sync boost", "SW power cap"}
)
"""Throttle reasons that do not explain a slow step: a fully loaded GPU often sits at its power
cap."""

_NO_USE = 0.05
_GIB = 1024**3


def rows(sample: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    """The GPUs that responded; empty if there is no sample or NVML failed."""
    gpus = (sample or {}).get("gpus")
    if not isinstance(gpus, Sequence):
        return ()
    return [row for row in gpus if isinstance(row, Mapping) and row.get("state", "ok") == "ok"]


def throttling(sample: Mapping[str, Any] | None) -> list[str]:
    """Throttle reasons, each with the number of GPUs it affects."""
    counts: dict[str, int] = {}
    for row in rows(sample):
        for reason in row.get("throttle") or ():
            if reason not in _ORDINARY:
                counts[reason] = counts.get(reason, 0) + 1
    return [
        f"{reason} on {count} GPU{'s' if count > 1 else ''}"
        for reason, count in sorted(counts.items())
    ]


def power_share(sample: Mapping[str, Any] | None) -> float | None:
    """Return the mean ratio of power draw to power limit over the GPUs that report both; None if no
    GPU does."""
    shares = [
        row["power_w"] / row["power_limit_w"]
        for row in rows(sample)
        if row.get("power_w") and row.get("power_limit_w")
    ]
    return sum(shares) / len(shares) if shares else None


def no_use(sample: Mapping[str, Any] | None, low_memory_gb: float) -> str | None:
    """Describe the GPUs if all of them are idle and hold no model; None if any GPU is busy or holds
    a model, or if this is unknown."""
    seen = rows(sample)
    busiest, fullest = 0.0, 0.0
    for row in seen:
        use, memory = row.get("utilization_ratio"), row.get("memory_used_bytes")
        if use is None or memory is None:
            return None
        busiest, fullest = max(busiest, use), max(fullest, memory / _GIB)
    if not seen or busiest > _NO_USE or fullest >= low_memory_gb:
        return None
    gpus = counted(len(seen), "GPU")
    return (
        f"NVML shows no GPU in use: {gpus}, at most {busiest:.0%} busy, "
        f"at most {fullest:.2f} GB in use"
    )
