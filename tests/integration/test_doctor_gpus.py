"""`doctor --json` and `run` with a fake NVML library, end to end: each fault its finding, the others their rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fake_nvml import FakeNvml, fake_nvml, nvml_library

__all__ = ["fake_nvml", "nvml_library"]

TORCH = Path(__file__).parent.parent / "fakes" / "torch_with_cuda"
GUARD = [sys.executable, "-c", "from miner_guard.cli.main import main; main()"]
CRITICAL = 69


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A miner's interpreter whose torch has CUDA."""
    program = tmp_path / "bin" / "python3"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH={TORCH} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


def environment(fake: FakeNvml | None, tmp_path: Path, **settings: object) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MINER_GUARD_", "CUDA_"))}
    own = {f"MINER_GUARD_{k}": str(v) for k, v in {"GPU__PROBE_TIMEOUT_S": 20, **settings}.items()}
    return {**env, **own, "MINER_GUARD_STATE_DIR": str(tmp_path / "state"), **(fake.env if fake else {})}


def doctor(
    fake: FakeNvml | None, tmp_path: Path, python: Path, *flags: str, **settings: object
) -> tuple[int, dict[str, Any]]:
    command = [*GUARD, "doctor", "--json", *flags, "--", str(python), "miner.py"]
    done = subprocess.run(
        command, env=environment(fake, tmp_path, **settings), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode in (0, CRITICAL), done.stderr
    return done.returncode, json.loads(done.stdout)


def levels(document: dict[str, Any], check: str) -> dict[int | None, str]:
    return {c["gpu"]: c["level"] for c in document["checks"] if c["check"] == check}


def words(document: dict[str, Any], check: str) -> str:
    return " | ".join(c["seen"] for c in document["checks"] if c["check"] == check)


def test_four_healthy_gpus_are_all_well(fake_nvml: FakeNvml, tmp_path: Path, python: Path) -> None:
    code, document = doctor(fake_nvml, tmp_path, python, "--expect-gpus", "4")
    assert code == 0, document["checks"]
    assert document["counts"]["critical"] == 0
    assert levels(document, "gpu.state") == dict.fromkeys(range(4), "ok")
    assert document["torch"]["gpu_count"] == 4
    assert [row["uuid"][-1] for row in document["nvml"]["gpus"]] == ["0", "1", "2", "3"]
    assert {c["level"] for c in document["checks"] if c["check"].startswith(("gpu.", "cuda.", "driver."))} == {"ok"}


@pytest.mark.parametrize(
    ("state", "check", "level", "says"),
    [
        ({"fail.*.2": 15}, "gpu.state", "critical", "GPU 2 is lost"),
        ({"fail.*.2": 16}, "gpu.state", "critical", "GPU 2 must be reset"),
        ({"fail.*.2": 999}, "gpu.state", "critical", "GPU 2 answers Unknown Error"),
        ({"fail.*.2": 4}, "gpu.state", "unknown", "not readable"),
        ({"ecc.unc.vol.2": 3}, "gpu.ecc", "critical", "3 uncorrected"),
        ({"rows.pending.2": 1}, "gpu.row_remap", "critical", "pending"),
        ({"recovery.2": 1}, "gpu.recovery_action", "critical", "reset the GPU"),
        ({"clocks.reasons.2": 0x40}, "gpu.throttle", "warn", "HW thermal"),
        ({"pcie.width.2": 8, "util.gpu.2": 97}, "gpu.pcie", "warn", "x8 under load"),
        ({"compute_mode.2": 2}, "gpu.compute_mode", "critical", "prohibited"),
        ({"fabric": 3, "fabric.2": 1}, "gpu.fabric", "critical", "not started"),
        ({"mem.used.2": 60 << 30}, "gpu.held_memory", "critical", "60.0 GB of 80.0 GB held"),
    ],
)
def test_one_bad_gpu_is_found_and_the_others_keep_their_rows(
    fake_nvml: FakeNvml, tmp_path: Path, python: Path, state: dict[str, object], check: str, level: str, says: str
) -> None:
    fake_nvml.set(state)
    code, document = doctor(fake_nvml, tmp_path, python, "--expect-gpus", "4")
    assert levels(document, check)[2] == level
    assert says in words(document, check)
    assert code == (CRITICAL if level == "critical" else 0)
    others = [c for c in document["checks"] if c["gpu"] in (0, 1, 3)]
    assert {c["level"] for c in others} == {"ok"}
    assert {c["gpu"] for c in others} == {0, 1, 3}
    assert all(c["next_step"] for c in document["checks"] if c["gpu"] == 2 and c["level"] != "ok")


def test_an_idle_link_that_has_clocked_down_is_no_finding(fake_nvml: FakeNvml, tmp_path: Path, python: Path) -> None:
    fake_nvml.set({"pcie.gen": 1, "pcie.width": 8, "util.gpu": 0})
    code, document = doctor(fake_nvml, tmp_path, python)
    assert set(levels(document, "gpu.pcie").values()) == {"ok"}
    assert code == 0


@pytest.mark.parametrize(
    ("code", "says"), [(9, "not loaded"), (12, "libnvidia-ml"), (18, "versions differ"), (999, "Unknown Error")]
)
def test_each_failure_of_the_driver_is_told_apart(
    fake_nvml: FakeNvml, tmp_path: Path, python: Path, code: int, says: str
) -> None:
    fake_nvml.set({"fail.init": code, "torch.count": 0})
    exit_code, document = doctor(fake_nvml, tmp_path, python, "--expect-gpus", "4")
    assert exit_code == CRITICAL
    assert says in words(document, "driver.nvml")
    assert levels(document, "cuda.available") == {None: "critical"}


def test_a_driver_that_hangs_is_a_finding_and_not_a_hang(fake_nvml: FakeNvml, tmp_path: Path, python: Path) -> None:
    fake_nvml.set({"hang.nvmlDeviceGetUtilizationRates.1": 600})
    start = time.monotonic()
    code, document = doctor(fake_nvml, tmp_path, python, GPU__PROBE_TIMEOUT_S=6)
    assert time.monotonic() - start < 45
    assert code == CRITICAL
    assert levels(document, "gpu.state") == {0: "ok", 1: "critical", 2: "ok", 3: "ok"}
    assert "hangs the driver" in words(document, "gpu.state")
    assert document["nvml"]["seconds"] < 6


def test_no_permission_anywhere_is_not_readable_and_never_well(
    fake_nvml: FakeNvml, tmp_path: Path, python: Path
) -> None:
    fake_nvml.set({"fail.*": 4})
    code, document = doctor(fake_nvml, tmp_path, python)
    assert code == 0
    assert levels(document, "gpu.state") == dict.fromkeys(range(4), "unknown")
    assert document["nvml"]["gpus"][0]["memory_used_bytes"] is None
    assert "Insufficient Permissions" in document["nvml"]["gpus"][0]["unread"]["memory_used_bytes"]
    assert not levels(document, "gpu.ecc")


def test_a_gpu_that_computes_nothing_is_found_though_nvml_is_content(
    fake_nvml: FakeNvml, tmp_path: Path, python: Path
) -> None:
    fake_nvml.set({"torch.broken.1": 1})
    code, document = doctor(fake_nvml, tmp_path, python, "--expect-gpus", "4")
    assert code == CRITICAL
    assert "cuda:1: RuntimeError: CUDA error" in words(document, "cuda.use")
    assert words(document, "cuda.use").count("work") == 3


def test_a_driver_older_than_torchs_cuda_is_critical(fake_nvml: FakeNvml, tmp_path: Path, python: Path) -> None:
    fake_nvml.set({"cuda": 11080})
    code, document = doctor(fake_nvml, tmp_path, python, "--expect-gpus", "4")
    assert code == CRITICAL
    assert "torch is built for CUDA 12.4, the driver knows 11.8" in words(document, "driver.cuda_version")


def test_a_mask_on_the_gpus_is_no_missing_gpu(fake_nvml: FakeNvml, tmp_path: Path, python: Path) -> None:
    fake_nvml.set({"torch.count": 2})
    command = [*GUARD, "doctor", "--json", "--", str(python), "miner.py"]
    env = {**environment(fake_nvml, tmp_path), "CUDA_VISIBLE_DEVICES": "0,1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["expected_gpus"] == {"count": 2, "by": "what is there"}


def test_without_a_gpu_it_depends_on_who_expects_one(tmp_path: Path) -> None:
    code, document = doctor(None, tmp_path, Path(sys.executable), "--expect-gpus", "4")
    if document["nvml"]["state"] != "absent":
        pytest.skip("this machine has an NVIDIA driver")
    assert code == CRITICAL
    assert "CUDA is not available" in words(document, "cuda.available")
    code, document = doctor(None, tmp_path, Path(sys.executable), "--expect-gpus", "0")
    assert code == 0
    assert "CUDA is not available" in words(document, "cuda.available")


# Through `run`


class Running:
    """A guard with a miner that only waits."""

    def __init__(
        self,
        fake: FakeNvml,
        tmp_path: Path,
        python: Path,
        *flags: str,
        miner: list[str] | None = None,
        **settings: object,
    ) -> None:
        self.log = tmp_path / "state" / "guard.jsonl"
        quick = {"HEALTH__SAMPLE_EVERY_S": 0.5, "HEALTH__SAMPLER_TIMEOUT_S": 4, "GPU__PREFLIGHT_WAIT_S": 0, **settings}
        waits = [str(python), "-c", "import time; print('the miner lives', flush=True); time.sleep(120)"]
        self.process = subprocess.Popen(
            [*GUARD, "run", *flags, "--", *(miner or waits)], env=environment(fake, tmp_path, **quick),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def events(self) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def wait_for(self, event: str, text: str = "", seconds: float = 60) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for record in self.events():
                if record["event"] == event and text in record["msg"]:
                    return record
            time.sleep(0.1)
        raise AssertionError(f"no {event} {text!r} in {[r['msg'] for r in self.events()]}")

    def end(self) -> tuple[int, str]:
        self.process.terminate()
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output


def test_run_starts_on_healthy_gpus_and_says_a_loss_and_an_unplug_while_it_goes_on(
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
        running.wait_for("gpu_recovered", "GPU 1")
        fake_nvml.set(count=3)
        assert running.wait_for("gpu_fault", "is no longer there")["gpu"] == 3
        fake_nvml.set({"ecc.unc.vol.0": 1})
        running.wait_for("gpu_fault", "uncorrected ECC")
        # Told once, and to nobody while the reader is being replaced after the unplug: it happens until it is heard.
        while not any("Xid 79" in record["msg"] for record in running.events()):
            fake_nvml.set({"xid.2": 0})
            time.sleep(0.5)
            fake_nvml.set({"xid.2": 79})
            time.sleep(2.0)
        fake_nvml.set({"clocks.reasons.1": 0x40, "pcie.width.1": 8, "rows.pending.2": 1})
        running.wait_for("gpu_fault", "GPU 1 PCIe gen 4 x8 under load")
        running.wait_for("gpu_fault", "a row remap is pending")
        running.wait_for("gpu_fault", "is throttled (HW thermal) in 6 samples")
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
    count = running.wait_for("preflight_finding", "gpu.count", seconds=1)
    assert count["limit"] == "4 (by this host at the last run)"


def test_run_only_warns_where_the_setting_says_so(fake_nvml: FakeNvml, tmp_path: Path, python: Path) -> None:
    fake_nvml.set({"rows.pending.1": 1})
    running = Running(fake_nvml, tmp_path, python, GPU__ON_CRITICAL="warn")
    try:
        running.wait_for("miner_started")
        assert running.wait_for("preflight_finding", "row remap")["level"] == "critical"
    finally:
        assert running.end()[0] == 0


def test_a_driver_that_is_late_after_boot_is_waited_for(fake_nvml: FakeNvml, tmp_path: Path, python: Path) -> None:
    fake_nvml.set({"fail.init": 9, "torch.count": 0})
    running = Running(fake_nvml, tmp_path, python, "--expect-gpus", "4", GPU__PREFLIGHT_WAIT_S=60)
    try:
        running.wait_for("preflight_finding", "not loaded")
        assert not any(r["event"] == "miner_started" for r in running.events())
        fake_nvml.set({"fail.init": None, "torch.count": None})
        running.wait_for("miner_started")
    finally:
        assert running.end()[0] == 0


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


@pytest.mark.parametrize("expect", ["2", "0"])
def test_the_red_flags_are_up_through_run_where_a_gpu_is_expected_and_only_there(tmp_path: Path, expect: str) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "miner.py"
    script.write_text(MINER)
    settings = {"GPU__ON_CRITICAL": "warn", "GPU__PREFLIGHT_WAIT_S": 0}
    done = subprocess.run(
        [*GUARD, "run", "--no-restart", "--expect-gpus", expect, "--", sys.executable, str(script)],
        env=environment(None, tmp_path, **settings), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    if "CUDA available: True" in done.stdout:
        pytest.skip("this machine has a GPU")
    assert "🔍 GPU DIAGNOSTICS" in done.stdout
    assert "✓ Gradient accumulation steps: 256" in done.stdout
    assert "rank 0: device cpu" in done.stdout
    flags = ("CUDA NOT AVAILABLE - Model will run on CPU (VERY SLOW!)", "Model is on CPU! This will be EXTREMELY SLOW!")
    for flag in flags:
        assert done.stdout.count(flag) == (1 if expect == "2" else 0)
    assert ("CRITICAL ERROR" in done.stdout) == (expect == "2")


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
        "GPU__ON_UNDERUSE": "relaunch", "GPU__BATCH_ARGUMENT": "--batch", "GPU__FIRST_CHECK_S": 2,
        "GPU__MODEL_NAME": "ResNet-18", "GPU__MEMORY_SETTLE_S": 0, "GPU__PREFLIGHT": "false",
    }  # fmt: skip
    running = Running(fake_nvml, tmp_path, python, miner=[str(python), str(script), "--batch=128"], **settings)
    try:
        first = running.wait_for("gpu_relaunch", "128 -> 256")
        assert "GPU memory at 15%" in first["msg"]
        running.wait_for("gpu_relaunch", "256 -> 512")
        running.wait_for("gpu_usage", "GPU at 60% is good for small model (ResNet-18)")
        commands = [r["command"].rpartition(" ")[2] for r in running.events() if r["event"] == "miner_started"]
        assert commands == ["--batch=128", "--batch=256", "--batch=512"]
        assert not any(r["event"] == "crash_loop" for r in running.events())
    finally:
        running.end()


def test_a_stop_during_a_preflight_that_hangs_ends_the_guard_at_once(
    fake_nvml: FakeNvml, tmp_path: Path, python: Path
) -> None:
    fake_nvml.set({"hang.init": 600})
    running = Running(fake_nvml, tmp_path, python, "--expect-gpus", "4", GPU__PROBE_TIMEOUT_S=100)
    running.wait_for("guard_started")
    time.sleep(1.5)
    start = time.monotonic()
    code, output = running.end()
    assert time.monotonic() - start < 20
    assert code == 0, output
    assert "MINER STARTED" not in output


def test_the_table_is_readable_and_shows_no_secret(fake_nvml: FakeNvml, tmp_path: Path, python: Path) -> None:
    fake_nvml.set({"ecc.unc.vol.2": 3})
    env = {**environment(fake_nvml, tmp_path), "COLUMNS": "100", "R2_WRITE_SECRET": "s3cr3t-of-the-bucket"}
    command = [*GUARD, "doctor", "--", str(python), "miner.py", "--key=s3cr3t-of-the-bucket"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == CRITICAL
    flat = " ".join(done.stdout.split())
    assert "GPU 2: 3 uncorrected ECC errors" in flat
    assert "→ results may be wrong: drain the GPU" in flat
    assert "GPU 0, 1, 3: 0 uncorrected ECC errors" in flat
    assert "env.secret_on_command_line" in done.stdout
    assert "s3cr3t" not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
