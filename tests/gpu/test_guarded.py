"""The guard over the demo on one device, from a fault to the first step after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from miner_guard.state_dir import StateDir
from tests.gpu.conftest import Table
from tests.support.waiting import until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

GUARD = [sys.executable, "-m", "miner_guard"]
STEPS = 6
FAULT = 4


class Demo:
    """`miner-guard demo` with one rank, run to its end."""

    def __init__(self, folder: Path, *faults: str, **settings: object) -> None:
        self.state = StateDir(folder / "state")
        own = {f"MINER_GUARD_{key}": str(value) for key, value in settings.items()}
        env = {k: v for k, v in os.environ.items() if not k.startswith("MINER_GUARD_")}
        words = [word for fault in faults for word in ("--fault", fault)]
        self.process = subprocess.Popen(
            [*GUARD, "demo", "--ranks", "1", "--steps", str(STEPS), *words],
            env={**env, **own, "MINER_GUARD_STATE_DIR": str(self.state.root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, seconds: float = 400) -> str:
        output, _ = self.process.communicate(timeout=seconds)
        return output

    def events(self, name: str = "") -> list[dict[str, Any]]:
        if not self.state.log.exists():
            return []
        records = [json.loads(line) for line in self.state.log.read_text().splitlines()]
        return [r for r in records if not name or r["event"] == name]


def when(record: dict[str, Any]) -> float:
    return datetime.fromisoformat(record["ts"].replace("Z", "+00:00")).timestamp()


def processes_on_the_gpu() -> set[int]:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    return {p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}


def test_the_demo_trains_and_the_guard_has_no_context(
    cuda: bool, table: Table, tmp_path: Path
) -> None:
    demo = Demo(tmp_path)
    until(lambda: demo.events("inner_step"), 120, "a first step")
    if cuda:
        on_gpu = processes_on_the_gpu()
        assert demo.process.pid not in on_gpu
        table.add("CUDA contexts of the supervisor", 0, "0")
    else:
        table.add("CUDA contexts of the supervisor", None, "0")
    output = demo.finish()
    assert demo.process.returncode == 0, output
    (block,) = demo.events("gpu_diagnostics")
    assert block["ranks"][0]["cuda_available"] is cuda
    steps = demo.events("inner_step")
    assert (steps[-1]["gpu_mem_gb"] is not None) == cuda
    table.add("demo: inner steps", steps[-1]["inner_step"], str(STEPS))


@pytest.mark.parametrize("fault", ["sigkill", "oom"])
def test_after_a_fault_training_continues_one_step_back_at_most(
    cuda: bool, table: Table, tmp_path: Path, fault: str
) -> None:
    demo = Demo(tmp_path, f"{fault}@{FAULT}", RESTART__BACKOFF_S="0.5")
    output = demo.finish()
    assert demo.process.returncode == 0, output
    (exited,) = demo.events("miner_exited")
    (resumed,) = demo.events("checkpoint_resumed")
    after = next(r for r in demo.events("inner_step") if when(r) > when(resumed))
    lost = FAULT - 1 - resumed["step"]
    table.add(f"{fault}: end to first new step", f"{when(after) - when(exited):.1f} s")
    table.add(f"{fault}: steps lost", lost, "<= 1")
    assert 0 <= lost <= 1
    if fault == "oom":
        labels = {r["label"] for r in demo.events("incident")}
        assert any("oom" in label for label in labels), labels


def test_a_hang_is_named_with_stacks(table: Table, tmp_path: Path) -> None:
    demo = Demo(
        tmp_path, f"hang@{FAULT}", HANG__MIN_S="5", HANG__FACTOR="1", RESTART__BACKOFF_S="0.5"
    )
    output = demo.finish()
    assert demo.process.returncode == 0, output
    (hang,) = demo.events("hang_detected")
    assert hang["culprits"] == [0]
    assert demo.events("stack_dump")
    (resumed,) = demo.events("checkpoint_resumed")
    table.add("hang: steps lost", FAULT - 1 - resumed["step"], "<= 1")
