"""GPU memory already in use before the launch. Reports amounts, not processes: inside a container
NVML's pids are the host's."""

from __future__ import annotations

from collections.abc import Iterator

from miner_guard.diagnosis.check import Check, Snapshot, gib

HELD_BYTES = 1024**3
"""An idle GPU uses a few megabytes; a bare CUDA context 0.3 to 0.6 GB."""

HELD_SHARE = 0.5
"""Once this share of the GPU is in use, the miner is unlikely to fit."""


def checks(s: Snapshot) -> Iterator[Check]:
    """Judge each GPU by its lowest reading: an exiting process frees its memory between
    readings."""
    for row in s.gpu_rows:
        levels = [reading[row["uuid"]] for reading in s.held if row.get("uuid") in reading]
        if not levels:
            continue
        held = min(levels)
        total = row.get("memory_total_bytes") or 0
        if held < HELD_BYTES:
            seen = f"GPU {row['index']}: {gib(held)} in use"
            yield Check("gpu.held_memory", "ok", seen, gib(HELD_BYTES), None, row["index"])
            continue
        much = bool(total) and held > HELD_SHARE * total and s.expectation.count != 0
        level = "critical" if much else "warn"
        seen = (
            f"GPU {row['index']}: {gib(held)} of {gib(total)} held before the launch, "
            f"in {len(levels)} readings"
        )
        step = (
            "an orphan from an earlier run, or another tenant: find it with nvidia-smi and kill it"
        )
        yield Check(
            "gpu.held_memory", level, seen, gib(HELD_BYTES), step, row["index"], may_clear=True
        )
