"""`doctor --json` and `run` with a fake NVML library, end to end: each fault has its event, and
the other GPUs keep their rows."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.gpu_guard import CRITICAL, GUARD, environment, python
from tests.support.fake_nvml import FakeNvml, fake_nvml, nvml_library

__all__ = ["fake_nvml", "nvml_library", "python"]


def doctor(
    fake: FakeNvml | None, tmp_path: Path, python: Path, *flags: str, **settings: object
) -> tuple[int, dict[str, Any]]:
    command = [*GUARD, "doctor", "--json", *flags, "--", str(python), "miner.py"]
    done = subprocess.run(
        command,
        env=environment(fake, tmp_path, **settings),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, CRITICAL), done.stderr
    return done.returncode, json.loads(done.stdout)


def levels(document: dict[str, Any], check: str) -> dict[int | None, str]:
    return {c["gpu"]: c["level"] for c in document["checks"] if c["check"] == check}


def words(document: dict[str, Any], check: str) -> str:
    return " | ".join(c["seen"] for c in document["checks"] if c["check"] == check)


def test_four_healthy_gpus_pass_every_check(
    fake_nvml: FakeNvml, tmp_path: Path, python: Path
) -> None:
    code, document = doctor(fake_nvml, tmp_path, python, "--expect-gpus", "4")
    assert code == 0, document["checks"]
    assert document["counts"]["critical"] == 0
    assert document["verdict"] == max(
        (c["level"] for c in document["checks"]), key=["ok", "unknown", "warn", "critical"].index
    )
    assert levels(document, "gpu.state") == dict.fromkeys(range(4), "ok")
    assert document["torch"]["gpu_count"] == 4
    assert [row["uuid"][-1] for row in document["nvml"]["gpus"]] == ["0", "1", "2", "3"]
    assert {
        c["level"]
        for c in document["checks"]
        if c["check"].startswith(("gpu.", "cuda.", "driver."))
    } == {"ok"}


Faults = dict[int, tuple[dict[str, object], str, str, str]]
"""For each GPU, the fake NVML's answers, and the check, level and words that `doctor` reports."""


@pytest.mark.parametrize(
    "faults",
    [
        {
            1: ({"fail.*.1": 15}, "gpu.state", "critical", "GPU 1 is lost"),
            2: ({"ecc.unc.vol.2": 3}, "gpu.ecc", "critical", "3 uncorrected"),
            3: ({"mem.used.3": 60 << 30}, "gpu.held_memory", "critical", "60.0 GB of 80.0 GB held"),
        },
        {
            1: ({"fail.*.1": 4}, "gpu.state", "unknown", "not readable"),
            2: ({"clocks.reasons.2": 0x40}, "gpu.throttle", "warn", "HW thermal"),
            3: ({"pcie.width.3": 8, "util.gpu.3": 97}, "gpu.pcie", "warn", "x8 under load"),
        },
        {
            1: ({"fail.*.1": 999}, "gpu.state", "critical", "GPU 1 reports Unknown Error"),
            2: ({"fabric": 3, "fabric.2": 1}, "gpu.fabric", "critical", "manager is missing"),
            3: ({"rows.pending.3": 1}, "gpu.row_remap", "critical", "pending"),
        },
    ],
    ids=["critical", "not critical", "unusable"],
)
def test_each_bad_gpu_is_found_and_the_good_one_keeps_its_rows(
    fake_nvml: FakeNvml, tmp_path: Path, python: Path, faults: Faults
) -> None:
    for state, *_ in faults.values():
        fake_nvml.set(state)
    code, document = doctor(fake_nvml, tmp_path, python, "--expect-gpus", "4")
    for gpu, (_, check, level, says) in faults.items():
        assert levels(document, check)[gpu] == level
        assert says in words(document, check)
        bad = [c for c in document["checks"] if c["gpu"] == gpu and c["level"] != "ok"]
        assert {c["check"] for c in bad} == {check}
        assert all(c["next_step"] for c in bad)
    assert code == (CRITICAL if any(f[2] == "critical" for f in faults.values()) else 0)
    assert {c["level"] for c in document["checks"] if c["gpu"] == 0} == {"ok"}


def test_a_driver_that_hangs_is_an_event_and_not_a_hang(
    fake_nvml: FakeNvml, tmp_path: Path, python: Path
) -> None:
    fake_nvml.set({"hang.nvmlDeviceGetUtilizationRates.1": 600})
    start = time.monotonic()
    code, document = doctor(fake_nvml, tmp_path, python)
    assert time.monotonic() - start < 120, "6 s are meant; the call hangs for 600"
    assert code == CRITICAL
    assert levels(document, "gpu.state") == {0: "ok", 1: "critical", 2: "ok", 3: "ok"}
    assert "hangs the driver" in words(document, "gpu.state")
    assert document["nvml"]["seconds"] < 60


def test_without_any_permission_gpus_are_unknown_and_never_healthy(
    fake_nvml: FakeNvml, tmp_path: Path, python: Path
) -> None:
    fake_nvml.set({"fail.*": 4})
    code, document = doctor(fake_nvml, tmp_path, python)
    assert code == 0
    assert levels(document, "gpu.state") == dict.fromkeys(range(4), "unknown")
    assert document["nvml"]["gpus"][0]["memory_used_bytes"] is None
    assert "Insufficient Permissions" in document["nvml"]["gpus"][0]["unread"]["memory_used_bytes"]
    assert not levels(document, "gpu.ecc")


def test_a_gpu_that_computes_nothing_is_found_although_nvml_calls_it_healthy(
    fake_nvml: FakeNvml, tmp_path: Path, python: Path
) -> None:
    fake_nvml.set({"torch.broken.1": 1})
    code, document = doctor(fake_nvml, tmp_path, python, "--expect-gpus", "4")
    assert code == CRITICAL
    assert "cuda:1: RuntimeError: CUDA error" in words(document, "cuda.use")
    assert words(document, "cuda.use").count("work") == 3


def test_the_table_is_readable_and_shows_no_secret(
    fake_nvml: FakeNvml, tmp_path: Path, python: Path
) -> None:
    fake_nvml.set({"ecc.unc.vol.2": 3})
    env = {
        **environment(fake_nvml, tmp_path),
        "COLUMNS": "100",
        "R2_WRITE_SECRET": "s3cr3t-of-the-bucket",
    }
    command = [*GUARD, "doctor", "--", str(python), "miner.py", "--key=s3cr3t-of-the-bucket"]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == CRITICAL
    flat = " ".join(done.stdout.split())
    assert "GPU 2: 3 uncorrected ECC errors" in flat
    assert "→ results may be wrong: drain the GPU" in flat
    assert "GPU 0, 1, 3: 0 uncorrected ECC errors" in flat
    assert "env.secret_on_command_line" in done.stdout
    assert "s3cr3t" not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
