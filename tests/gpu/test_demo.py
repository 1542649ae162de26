"""The demo with one rank, on NCCL where there is a GPU: it trains, runs the diagnosis and, after
faults, resumes at most one step back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.guarded import MARK, Guarded, when
from tests.gpu.conftest import Table
from tests.gpu.machine import Machine, child_environment

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ON_GPU = "GPU processes by NVML while the demo trains"
SETTINGS = {
    # The fake library has a GPU but torch here has none, so the preflight would rightly refuse to
    # start.
    "GPU__EXPECT": "1",
    "GPU__PREFLIGHT": "warn",
    "GPU__PREFLIGHT_WAIT_S": "0",
    # Several times a step's time on two busy cores.
    "HANG__MIN_S": "20",
    "RESTART__BACKOFF_S": "0.5",
    "LOGS__STEP_LINES_PER_S": "100",
}


def start(
    guarded: Guarded, machine: Machine, steps: int, *faults: str, ranks: int = 1
) -> subprocess.Popen[bytes]:
    """Start `miner-guard demo`, with its log in the file that `guarded` reads."""
    words = [word for fault in faults for word in ("--fault", fault)]
    line = [sys.executable, "-m", "miner_guard", "demo", "--ranks", str(ranks)]
    own = {f"MINER_GUARD_{key}": value for key, value in SETTINGS.items()}
    env = {**child_environment(machine), **own, MARK: guarded.token}
    with guarded.output.open("ab") as out:
        process = subprocess.Popen(
            [*line, "--steps", str(steps), "--state-dir", str(guarded.state.root), *words],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    guarded.processes.append(process)
    return process


def processes_on_the_gpu() -> set[int]:
    """The pids that NVML lists; in a container, it may list the pids of another namespace, or
    none."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return {p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    finally:
        pynvml.nvmlShutdown()


def libraries(pid: int) -> set[str]:
    """The CUDA and torch libraries that a process has mapped: without libcuda it can't have a
    context."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    names = {Path(words[5]).name for line in lines if len(words := line.split()) > 5}
    return {name for name in names if name.startswith(("libcuda", "libtorch", "libnccl"))}


def test_the_demo_trains_and_the_supervisor_has_no_cuda_context(
    guarded: Guarded, machine: Machine, table: Table
) -> None:
    before = processes_on_the_gpu() if machine.cuda else set()
    process = start(guarded, machine, 8)
    first = guarded.wait_for("inner_step", seconds=150)
    assert libraries(process.pid) == set()
    if machine.cuda:
        # This process may have a context too, and a container may list pids of another namespace.
        on_gpu = processes_on_the_gpu() - before
        assert process.pid not in on_gpu
        table.add(ON_GPU, len(on_gpu), "1, or 0 in a container")
        assert len(on_gpu) <= 1
    else:
        table.add(ON_GPU, None, "1, or 0 in a container")
    table.add("CUDA libraries in the supervisor", 0, "0")
    assert process.wait(150) == 0, guarded.tail()
    block = guarded.named("gpu_diagnostics")[0]
    (rank,) = block["ranks"]
    assert "GPU DIAGNOSTICS" in block["msg"]
    assert rank["cuda_available"] is machine.cuda
    assert ("CUDA available: True" in block["msg"]) is machine.cuda
    flags = {e["event"] for e in guarded.events} & {"cuda_unavailable", "model_on_cpu"}
    # The guard expects the fake library's GPU, which torch here can't use: that is a red flag.
    assert flags == (set() if machine.cuda else {"cuda_unavailable", "model_on_cpu"})
    assert (first["gpu_mem_gb"] is not None) == machine.cuda
    steps = guarded.named("inner_step")
    table.add(
        "demo: inner steps on " + ("NCCL" if machine.cuda else "gloo"), steps[-1]["inner_step"], "8"
    )
    assert steps[-1]["inner_step"] == 8


def test_after_each_fault_training_continues_one_step_back_at_most(
    guarded: Guarded, machine: Machine, table: Table
) -> None:
    faults = {"sigkill": 4, "hang": 8, "oom": 12}
    process = start(guarded, machine, 14, *(f"{kind}@{step}" for kind, step in faults.items()))
    assert process.wait(280) == 0, guarded.tail()
    ends = guarded.named("miner_exited")[: len(faults)]
    resumed = guarded.named("checkpoint", "CHECKPOINT RESUMED")
    assert len(resumed) == len(faults)
    steps = guarded.named("inner_step")
    for (kind, step), end, back in zip(faults.items(), ends, resumed, strict=True):
        after = next(s for s in steps if when(s) > when(back))
        table.add(f"demo, {kind}: end of the launch to its first new step", _seconds(end, after))
        lost = step - 1 - back["step"]
        table.add(f"demo, {kind}: steps lost", lost, "<= 1")
        assert 0 <= lost <= 1
        assert back["path"].startswith("/dev/shm/")
    (hang,) = guarded.named("hang_detected")
    assert hang["culprits"] == [0]
    assert guarded.named("stack_dump")
    assert "cuda_oom" in _labels(guarded) or not machine.cuda
    assert any("oom" in label for label in _labels(guarded)), _labels(guarded)


def _seconds(start: dict[str, Any], end: dict[str, Any]) -> str:
    return f"{when(end) - when(start):.1f} s"


def _labels(guarded: Guarded) -> Sequence[str]:
    return [e["label"] for e in guarded.named("incident")]


def test_a_model_left_on_the_cpu_is_reported_before_its_first_step(
    guarded: Guarded, machine: Machine, table: Table
) -> None:
    process = start(guarded, machine, 3, "cpu-fallback@1")
    assert process.wait(150) == 0, guarded.tail()
    on_cpu = guarded.named("model_on_cpu")
    assert on_cpu
    assert on_cpu[0]["level"] == "critical"
    block = guarded.named("gpu_diagnostics")[0]
    assert block["ranks"][0]["model_device"] == "cpu"
    assert bool(guarded.named("cuda_unavailable")) is not machine.cuda
    assert when(on_cpu[0]) <= when(guarded.named("inner_step")[0])
    table.add("a model on the CPU: reported before the first step", "yes", "yes")
