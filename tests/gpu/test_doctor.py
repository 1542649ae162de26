"""`doctor` on this machine's GPU, against torch's facts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import Table
from tests.gpu.machine import FAKE_GPU, Machine, child_environment

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

FAKE_TORCH = Path(__file__).parent.parent / "support" / "fakes" / "torch_with_cuda"


def doctor(machine: Machine, folder: Path, *flags: str) -> dict[str, Any]:
    """The document of `doctor --json`. With the fake library, the interpreter that it asks has a
    fake torch with the library's CUDA devices."""
    python = folder / "python3"
    path = "" if machine.cuda else f"PYTHONPATH={FAKE_TORCH} "
    python.write_text(f'#!/bin/sh\n{path}exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    command = [sys.executable, "-m", "miner_guard", "doctor", "--json", "--expect-gpus", "1"]
    done = subprocess.run(
        [*command, "--state-dir", str(folder / "state"), *flags, "--", str(python), "miner.py"],
        env=child_environment(machine),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode in (0, 69), done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def checks(document: dict[str, Any], *prefixes: str) -> list[dict[str, Any]]:
    return [c for c in document["checks"] if c["check"].startswith(prefixes)]


def test_the_doctor_knows_this_gpu_and_finds_nothing_critical(
    machine: Machine, table: Table, tmp_path: Path
) -> None:
    document = doctor(machine, tmp_path)
    (row,) = document["nvml"]["gpus"]
    if machine.cuda:
        import torch

        name, total = torch.cuda.get_device_name(0), torch.cuda.mem_get_info(0)[1]
    else:
        name, total = FAKE_GPU["name"], FAKE_GPU["mem.total"]
    assert row["name"] == name
    # NVML includes the driver's reserved memory, CUDA does not.
    assert row["memory_total_bytes"] == pytest.approx(total, rel=0.05)
    assert document["torch"]["gpu_count"] == 1
    about = checks(document, "gpu.", "cuda.", "driver.")
    assert about
    assert not [c for c in about if c["level"] == "critical"]
    levels = Counter(c["level"] for c in about)
    counts = f"{levels['ok']} / {levels['warn']} / {levels['unknown']}"
    unread = ", ".join(sorted(row["unread"])) or "none"
    table.add("doctor: GPU checks ok / warning / unknown", counts)
    table.add("doctor: NVML fields that this machine does not report", unread)
    table.add("doctor: seconds", round(document["seconds"], 1))
