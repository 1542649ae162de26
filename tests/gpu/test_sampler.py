"""Compares the sampler's row for the GPU with nvidia-smi, under a constant load."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.faults.guarded import Guarded
from tests.gpu.conftest import Table
from tests.gpu.machine import FAKE_GPU, Machine
from tests.gpu.test_faults import start
from tests.support.present_state import status_of
from tests.support.waiting import until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

MIB = 1 << 20
ASKED = "uuid,name,memory.total,memory.used,temperature.gpu,power.draw"


def row(guarded: Guarded) -> dict[str, Any] | None:
    """The first GPU's row of the status; None before the first sample."""
    try:
        status = status_of(guarded.state.root)
    except (OSError, ValueError):
        return None
    gpus = ((status.get("health") or {}).get("gpus") or {}).get("gpus") or []
    return gpus[0] if gpus else None


def nvidia_smi() -> dict[str, str]:
    """The same facts from NVIDIA's own program; memory in MiB, power in W."""
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader,nounits", "--id=0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    values = [word.strip() for word in done.stdout.splitlines()[0].split(",")]
    return dict(zip(ASKED.split(","), values, strict=True))


def test_the_sampler_reads_what_nvidia_smi_reads(
    guarded: Guarded, machine: Machine, table: Table, tmp_path: Path
) -> None:
    process = start(guarded, machine, tmp_path, "steady", health__snapshot_every_s=1)
    guarded.wait_for("inner_step", 10, seconds=120)
    first = until(lambda: row(guarded), 60, "a sample")
    snapshots = len(guarded.named("health_snapshot"))
    guarded.wait_for("health_snapshot", snapshots + 2)
    smi = nvidia_smi() if machine.cuda else None
    sample = row(guarded)
    (tmp_path / "end").touch()
    assert process.wait(60) == 0, guarded.tail()
    assert sample is not None
    assert sample["uuid"] == first["uuid"]
    if smi is None:
        assert sample["name"] == FAKE_GPU["name"]
        assert sample["memory_total_bytes"] == FAKE_GPU["mem.total"]
        assert sample["power_w"] == pytest.approx(120.0)
        table.add("sampler and nvidia-smi", None, "agree")
        return
    assert (sample["uuid"], sample["name"]) == (smi["uuid"], smi["name"])
    assert sample["memory_total_bytes"] / MIB == pytest.approx(float(smi["memory.total"]), abs=1)
    assert sample["memory_used_bytes"] / MIB == pytest.approx(float(smi["memory.used"]), abs=256)
    # A container's NVML may report less than nvidia-smi prints, but never anything different.
    for ours, theirs, tolerance in (
        ("temperature_c", "temperature.gpu", 5),
        ("power_w", "power.draw", 200),
    ):
        if sample[ours] is not None and smi[theirs].replace(".", "").isdigit():
            assert sample[ours] == pytest.approx(float(smi[theirs]), abs=tolerance), ours
            table.add(f"sampler / nvidia-smi: {theirs}", f"{sample[ours]:.0f} / {smi[theirs]}")
    used = sample["memory_used_bytes"] / MIB
    table.add(
        "sampler / nvidia-smi: memory.used", f"{used:.0f} / {smi['memory.used']} MiB", "± 256"
    )
