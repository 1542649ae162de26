"""`run` and `doctor` over GPUs that a fake NVML library simulates: what prevents the start, what
the guard reports while the miner continues, and each fault with its GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.guarded import Guarded
from tests.support import requires
from tests.support.fake_nvml import FakeNvml, fake_nvml, nvml_library
from tests.support.waiting import until

__all__ = ["fake_nvml", "nvml_library"]

TORCH = requires.REPO / "tests" / "support" / "fakes" / "torch_with_cuda"
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


@pytest.fixture(autouse=True)
def no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own GPUs must not matter."""
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def environment(fake: FakeNvml | None, tmp_path: Path) -> dict[str, str]:
    state = {"MINER_GUARD_STATE_DIR": str(tmp_path / "state")}
    return {**os.environ, **state, **(fake.env if fake else {})}


class Running(Guarded):
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
        super().__init__(tmp_path)
        waits = "import time; print('the miner lives', flush=True); time.sleep(120)"
        quick = {"health.snapshot_every_s": 0.5, "gpu.preflight_wait_s": 0, "gpu.preflight": "true"}
        command = miner or [str(python), "-c", waits]
        self.process = self.start(command, *flags, settings={**quick, **settings}, env=fake.env)

    def event(
        self, name: str, text: str = "", *, after: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Wait for the first such event, or the first after the event `after`."""

        def found() -> list[dict[str, Any]]:
            later = self.events if after is None else self.events[self.events.index(after) + 1 :]
            return [r for r in later if r["event"] == name and text in r["msg"]]

        first: dict[str, Any] = until(found, 60, lambda: f"{name} {text!r}: {self.tail()}")[0]
        return first

    def end(self) -> tuple[int, str]:
        code = self.stop(signal.SIGTERM) if self.process.poll() is None else self.process.wait(60)
        return code, self.output.read_text()


def test_run_starts_on_healthy_gpus_and_reports_a_lost_and_an_unplugged_gpu_while_it_runs(
    fake_nvml: FakeNvml, tmp_path: Path, python: Path
) -> None:
    running = Running(fake_nvml, tmp_path, python)
    try:
        running.wait_for("miner_started")
        assert json.loads((tmp_path / "state" / "host.json").read_text())["gpu_count"] == 4
        time.sleep(1.5)
        fake_nvml.set({"fail.*.1": 15})
        lost = running.event("gpu_fault", "is lost")
        assert lost["level"] == "critical"
        assert lost["gpu"] == 1
        fake_nvml.set({"fail.*.1": None})
        running.event("gpu_fault", "GPU RECOVERED: GPU 1")
        fake_nvml.set(count=3)
        assert running.event("gpu_fault", "is no longer there")["gpu"] == 3
        fake_nvml.set({"ecc.unc.vol.0": 1})
        running.event("gpu_fault", "uncorrected ECC")
        fake_nvml.set({"clocks.reasons.1": 0x40, "pcie.width.1": 8, "rows.pending.2": 1})
        running.event("gpu_fault", "GPU 1 PCIe x8 under load")
        running.event("gpu_fault", "a row remap is pending")
        running.event("gpu_fault", "throttled (HW thermal) in 6 samples")
        fake_nvml.set({"xid.2": 79})
        running.event("gpu_fault", "Xid 79")
        fake_nvml.set({"hang.nvmlDeviceGetPowerUsage.2": 600})
        running.event("gpu_fault", "GPU 2 hangs the driver")
        fake_nvml.set({"hang.nvmlSystemGetDriverVersion": 600, "fail.init": 999})
        unread = running.event("guard_degraded", "gpus")
        assert (unread["sampler"], unread["level"]) == ("gpus", "warning")
        snapshot = running.event("health_snapshot", "gpu ?", after=unread)["snapshot"]
        assert snapshot["gpus"] is None
        assert snapshot["unknown"]["gpus"]
        assert snapshot["host"]["memory_used_bytes"] > 0, "everything else is read"
        fake_nvml.set({"hang.nvmlSystemGetDriverVersion": None, "fail.init": None})
        assert running.event("guard_degraded", "GUARD RECOVERED")["sampler"] == "gpus"
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
    code = running.process.wait(60)
    assert code == CRITICAL, running.tail()
    assert "the miner lives" not in running.tail()
    assert "PREFLIGHT gpu.count: 3 GPUs" in running.tail()
    count = running.event("preflight", "gpu.count")
    assert count["limit"] == "4, according to this host's last run"


def test_a_start_on_a_lost_gpu_is_left_to_another_machine_if_the_engine_has_one(
    fake_nvml: FakeNvml, tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = python.with_name("scontrol")
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n')
    scontrol.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
    for name, value in {**slurm, "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    fake_nvml.set({"fail.*.1": 15})
    running = Running(fake_nvml, tmp_path, python)
    assert running.process.wait(60) == 69, running.tail()
    assert "HOST WARNING: Slurm drains n1: gpu.state: GPU 1 is lost" in running.tail()
    assert (
        "update NodeName=n1 State=DRAIN Reason=miner-guard: gpu.state"
        in (tmp_path / "said").read_text()
    )


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
    settings = {"MINER_GUARD_GPU__PREFLIGHT": "warn", "MINER_GUARD_GPU__PREFLIGHT_WAIT_S": "0"}
    done = subprocess.run(
        [*GUARD, "run", "--no-restart", "--expect-gpus", "2", "--", sys.executable, str(script)],
        env={**environment(None, tmp_path), **settings},
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
        "gpu.on_underuse": "relaunch",
        "gpu.batch_argument": "--batch",
        "gpu.first_check_s": 2,
        "gpu.model_name": "ResNet-18",
        "gpu.memory_settle_s": 0,
        "gpu.preflight": "false",
    }
    running = Running(
        fake_nvml, tmp_path, python, miner=[str(python), str(script), "--batch=128"], **settings
    )
    try:
        first = running.event("gpu_usage", "128 -> 256")
        assert "GPU memory at 15%" in first["msg"]
        running.event("gpu_usage", "256 -> 512")
        running.event("gpu_usage", "GPU at 60% is good for small model (ResNet-18)")
        commands = [
            r["command"].rpartition(" ")[2] for r in running.events if r["event"] == "miner_started"
        ]
        assert commands == ["--batch=128", "--batch=256", "--batch=512"]
        assert not any(r["event"] == "crash_loop" for r in running.events)
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


def doctor(
    fake: FakeNvml | None, tmp_path: Path, python: Path, *flags: str
) -> tuple[int, dict[str, Any]]:
    command = [*GUARD, "doctor", "--json", *flags, "--", str(python), "miner.py"]
    done = subprocess.run(
        command,
        env=environment(fake, tmp_path),
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
            3: ({"rows.pending.3": 1, "rows.unc.3": 1}, "gpu.row_remap", "critical", "pending"),
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
