"""GPU faults in a rank: a kernel that never ends, an illegal access, full memory, memory that a
killed rank still holds. On the CPU, the same code paths run with the faults that a script can
imitate."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.guarded import Guarded, when
from tests.gpu.conftest import Table
from tests.gpu.machine import Machine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

SETTINGS = {
    "restart.backoff_s": 0.2,
    "miner.stop_timeout_s": 5,
    "hang.min_s": 5,
    "logs.step_lines_per_s": 100,
}
SLACK_BYTES = 1 << 30
"""How much memory a driver may keep for itself between two launches."""


def start(
    guarded: Guarded, machine: Machine, folder: Path, name: str, **settings: object
) -> subprocess.Popen[bytes]:
    """Start tests.gpu.miners.NAME under a guard."""
    command = [sys.executable, "-u", "-m", f"tests.gpu.miners.{name}", str(folder), guarded.token]
    own = {key.replace("__", "."): value for key, value in settings.items()}
    return guarded.start(command, settings={**SETTINGS, **own}, env=machine.env)


def collectives(guarded: Guarded) -> list[dict[str, Any]]:
    """Rank 0's Flight Recorder entries, from the hang's evidence folder."""
    (path,) = guarded.state.incidents.glob("*/collectives-rank-0000.json")
    entries: list[dict[str, Any]] = json.loads(path.read_text())["entries"]
    return entries


def test_a_kernel_that_spins_forever_is_a_hang_with_stacks_and_its_collective(
    guarded: Guarded, machine: Machine, table: Table, tmp_path: Path
) -> None:
    process = start(guarded, machine, tmp_path, "spin")
    hang = guarded.wait_for("hang_detected", seconds=150)
    restarted = guarded.wait_for("miner_started", 2, seconds=60)
    assert process.wait(120) == 0, guarded.tail()
    assert hang["culprits"] == [0]
    assert "in backward" in hang["msg"]
    (folder,) = guarded.state.incidents.iterdir()
    stacks = (folder / "stacks-rank-0000.txt").read_text()
    assert "spin.py" in stacks
    last = collectives(guarded)[-1]
    if machine.cuda:
        assert "synchronize" in stacks
        assert last["profiling_name"] == "nccl:all_reduce"
        assert last["state"] != "completed"
        table.add("spinning kernel: last collective in NCCL's dump", f"all_reduce, {last['state']}")
    else:
        assert last["profiling_name"] == "gloo:all_reduce"
        table.add("spinning kernel: last collective in NCCL's dump", None)
    table.add("spinning kernel: hang to relaunch", f"{when(restarted) - when(hang):.1f} s")


def test_an_illegal_memory_access_is_named_and_the_miner_restarted(
    guarded: Guarded, machine: Machine, table: Table, tmp_path: Path
) -> None:
    process = start(guarded, machine, tmp_path, "illegal_access")
    assert process.wait(150) == 0, guarded.tail()
    labels = [e["label"] for e in guarded.named("incident")]
    assert labels[:1] == ["cuda_illegal_memory_access"], labels
    assert len(guarded.named("miner_started")) == 2
    table.add("illegal memory access: incident", labels[0], "cuda_illegal_memory_access")


def test_memory_that_is_full_is_named_with_its_fixes(
    guarded: Guarded, machine: Machine, table: Table, tmp_path: Path
) -> None:
    process = start(guarded, machine, tmp_path, "out_of_memory")
    assert process.wait(150) == 0, guarded.tail()
    incident = guarded.named("incident")[0]
    assert incident["label"] == ("cuda_oom" if machine.cuda else "host_oom_kill"), incident
    assert incident["fixes"]
    table.add("out of memory: incident", incident["label"], "cuda_oom on a GPU")


def test_a_killed_ranks_memory_is_free_before_the_next_launch(
    guarded: Guarded, machine: Machine, table: Table, tmp_path: Path
) -> None:
    process = start(guarded, machine, tmp_path, "killed", gpu__memory_settle_s=60)
    # The level from before is read in a job, as soon as the miner was started.
    guarded.wait_for("inner_step", seconds=120)
    if machine.fake is not None:
        machine.fake.set({"mem.used": 60 << 30})
    (tmp_path / "die").touch()
    guarded.wait_for("miner_restarting", seconds=30)
    if machine.fake is not None:
        time.sleep(3)
        assert len(guarded.named("miner_started")) == 1, "the memory was still held"
        machine.fake.set({"mem.used": None})
    assert process.wait(120) == 0, guarded.tail()
    assert not [e for e in guarded.named("guard_degraded") if "GPU memory" in e["msg"]]
    before, after = map(int, (tmp_path / "free").read_text().split())
    missing = f"{(before - after) / 2**20:.0f} MiB" if machine.cuda else None
    table.add("kill -9: GPU memory missing at the next launch", missing, "< 1 GiB")
    assert before - after < SLACK_BYTES
