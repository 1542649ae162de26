"""`run` with a fake NVML library, end to end: what prevents the start, and what the guard reports
while the miner continues."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.gpu_guard import CRITICAL, GUARD, Running, environment, python
from tests.support.fake_nvml import FakeNvml, fake_nvml, nvml_library

__all__ = ["fake_nvml", "nvml_library", "python"]


def test_run_starts_on_healthy_gpus_and_reports_a_lost_and_an_unplugged_gpu_while_it_runs(
    fake_nvml: FakeNvml, tmp_path: Path, python: Path
) -> None:
    running = Running(fake_nvml, tmp_path, python)
    try:
        running.wait_for("miner_started")
        assert json.loads((tmp_path / "state" / "host.json").read_text())["gpu_count"] == 4
        time.sleep(1.5)
        fake_nvml.set({"fail.*.1": 15})
        lost = running.wait_for("gpu_fault", "is lost")
        assert lost["level"] == "critical"
        assert lost["gpu"] == 1
        fake_nvml.set({"fail.*.1": None})
        running.wait_for("gpu_fault", "GPU RECOVERED: GPU 1")
        fake_nvml.set(count=3)
        assert running.wait_for("gpu_fault", "is no longer there")["gpu"] == 3
        fake_nvml.set({"ecc.unc.vol.0": 1})
        running.wait_for("gpu_fault", "uncorrected ECC")
        fake_nvml.set({"clocks.reasons.1": 0x40, "pcie.width.1": 8, "rows.pending.2": 1})
        running.wait_for("gpu_fault", "GPU 1 PCIe x8 under load")
        running.wait_for("gpu_fault", "a row remap is pending")
        running.wait_for("gpu_fault", "throttled (HW thermal) in 6 samples")
        fake_nvml.set({"xid.2": 79})
        running.wait_for("gpu_fault", "Xid 79")
        fake_nvml.set({"hang.nvmlDeviceGetPowerUsage.2": 600})
        running.wait_for("gpu_fault", "GPU 2 hangs the driver")
        assert running.process.poll() is None
    finally:
        code, output = running.end()
    assert code == 0, output
    assert "CRITICAL ERROR" in output


def test_run_refuses_to_start_without_the_gpus_of_the_last_run(
    fake_nvml: FakeNvml, tmp_path: Path, python: Path
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "host.json").write_text('{"gpu_count": 4}')
    fake_nvml.set(count=3)
    running = Running(fake_nvml, tmp_path, python)
    output, _ = running.process.communicate(timeout=60)
    assert running.process.returncode == CRITICAL, output
    assert "the miner lives" not in output
    assert "PREFLIGHT gpu.count: 3 GPUs" in output
    count = running.wait_for("preflight", "gpu.count", seconds=1)
    assert count["limit"] == "4 (according to this host's last run)"


MINER = """
import sys, time
from types import SimpleNamespace
sys.path[:] = [p for p in sys.path if "torch_with_cuda" not in p]
import torch
import miner_guard
guard = miner_guard.init()
guard.diagnose(torch.nn.Linear(8, 8), batch_size=2, effective_batch_size=512)
guard.close(finished=True)
"""


def test_run_reports_both_red_flags_if_a_gpu_is_expected(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "miner.py"
    script.write_text(MINER)
    settings = {"GPU__PREFLIGHT": "warn", "GPU__PREFLIGHT_WAIT_S": 0}
    done = subprocess.run(
        [*GUARD, "run", "--no-restart", "--expect-gpus", "2", "--", sys.executable, str(script)],
        env=environment(None, tmp_path, **settings),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "CUDA available: True" in done.stdout:
        pytest.skip("this machine has a GPU")
    assert "🔍 GPU DIAGNOSTICS" in done.stdout
    assert "✓ Gradient accumulation steps: 256" in done.stdout
    assert "rank 0: device cpu" in done.stdout
    for flag in (
        "CUDA NOT AVAILABLE - Model will run on CPU (VERY SLOW!)",
        "Model is on CPU! This will be EXTREMELY SLOW!",
        "CRITICAL ERROR",
    ):
        assert flag in done.stdout


GREEDY = """
import sys, time
batch = int(sys.argv[1].partition("=")[2])
if batch > 512:
    raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
while True:
    share = min(batch / 512 * 60, 60)
    print(f"GPU Memory Used: {share * 0.24:.1f} GB / 24.0 GB ({share:.1f}%)", flush=True)
    time.sleep(0.2)
"""


def test_an_under_used_gpu_is_relaunched_with_a_larger_batch_on_request(
    fake_nvml: FakeNvml, tmp_path: Path, python: Path
) -> None:
    script = tmp_path / "miner.py"
    script.write_text(GREEDY)
    settings = {
        "GPU__ON_UNDERUSE": "relaunch",
        "GPU__BATCH_ARGUMENT": "--batch",
        "GPU__FIRST_CHECK_S": 2,
        "GPU__MODEL_NAME": "ResNet-18",
        "GPU__MEMORY_SETTLE_S": 0,
        "GPU__PREFLIGHT": "false",
    }
    running = Running(
        fake_nvml, tmp_path, python, miner=[str(python), str(script), "--batch=128"], **settings
    )
    try:
        first = running.wait_for("gpu_usage", "128 -> 256")
        assert "GPU memory at 15%" in first["msg"]
        running.wait_for("gpu_usage", "256 -> 512")
        running.wait_for("gpu_usage", "GPU at 60% is good for small model (ResNet-18)")
        commands = [
            r["command"].rpartition(" ")[2]
            for r in running.events()
            if r["event"] == "miner_started"
        ]
        assert commands == ["--batch=128", "--batch=256", "--batch=512"]
        assert not any(r["event"] == "crash_loop" for r in running.events())
    finally:
        running.end()


def test_a_stop_during_a_preflight_that_hangs_ends_the_guard_at_once(
    fake_nvml: FakeNvml, tmp_path: Path, python: Path
) -> None:
    fake_nvml.set({"hang.init": 600})
    running = Running(fake_nvml, tmp_path, python, "--expect-gpus", "4")
    running.wait_for("guard_started")
    time.sleep(1.5)
    start = time.monotonic()
    code, output = running.end()
    assert time.monotonic() - start < 60, "at once is meant; the preflight would take 100 s more"
    assert code == 0, output
    assert "MINER STARTED" not in output
