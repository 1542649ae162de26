"""ops/slurm/miner.sbatch on a real Slurm: a rank killed, a preemption, a GPU and a node lost, a
cancelled job."""

from __future__ import annotations

import os
import re
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.guarded import MARK, living
from tests.support import requires
from tests.support.fake_nvml import nvml_library
from tests.support.slurm import Slurm, cluster
from tests.support.waiting import until

__all__ = ["nvml_library"]

TRAIN = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import miner_guard
from miner_guard.checkpoints import Checkpointer

dist.init_process_group("gloo")
guard = miner_guard.init()
checkpoints = Checkpointer(Path(os.environ["CHECKPOINTS"]), every=10**9)
state = {"weight": torch.zeros(4), "step": torch.zeros(1)}
checkpoints.resume(state)
me = f"rank {dist.get_rank()}"
print(f"{me} pid {os.getpid()} begins after step {int(state['step'])}", flush=True)
for step in range(int(state["step"]) + 1, 10**6):
    time.sleep(0.25)
    if "\\nxid.0=79" in Path(os.environ["FAKE_NVML_STATE"]).read_text():
        raise RuntimeError("CUDA error: unspecified launch failure")
    dist.all_reduce(state["weight"])
    state["step"][0] = step
    guard.step(outer_step=1, inner_step=step, loss=3.0, lr=1e-3)
    if checkpoints.due(step, asked=guard.checkpoint_requested()):
        checkpoints.save(step, state)
        checkpoints.wait()
        print(f"{me} saved step {step}", flush=True)
"""


GUARD = """#!/bin/sh
export FAKE_NVML_STATE={folder}/nvml-$SLURMD_NODENAME LD_LIBRARY_PATH={library}
exec {python}/miner-guard "$@"
"""
"""Each node has GPUs of its own."""


def left(mark: str) -> list[str]:
    """Command lines of the job's processes that are still running."""
    return [words for _, words in living(mark) if "slurm" not in words]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if os.geteuid() != 0:
        pytest.skip("only root can start slurmd")
    with cluster(tmp_path, ["n1", "n2", "n3", "n4"]) as started:
        yield started


@pytest.mark.long
@pytest.mark.timeout(580)
def test_a_job_outlives_a_rank_a_preemption_a_gpu_and_a_node_and_leaves_nothing(
    tmp_path: Path, slurm: Slurm, nvml_library: Path
) -> None:
    requires.module("torch")
    mark = uuid.uuid4().hex
    (tmp_path / "train.py").write_text(TRAIN)
    bin_folder, python = tmp_path / "bin", Path(sys.executable).parent
    bin_folder.mkdir()
    (bin_folder / "miner-guard").write_text(
        GUARD.format(folder=tmp_path, library=nvml_library.parent, python=python)
    )
    (bin_folder / "miner-guard").chmod(0o755)
    for node in slurm.nodes:
        (tmp_path / f"nvml-{node}").write_text("count=1\n")
    slurm.env |= {
        "PATH": f"{bin_folder}:{python}:{os.environ['PATH']}",
        "TRAIN": str(tmp_path / "train.py"),
        "CHECKPOINTS": str(tmp_path / "checkpoints"),
        "STATE": str(tmp_path / "state"),
        "HEAD": "127.0.0.1",
        "MINER_GUARD_GPU__PREFLIGHT": "false",
        "MINER_GUARD_RESTART__BACKOFF_S": "0.5",
        "MINER_GUARD_HEALTH__SNAPSHOT_EVERY_S": "1",
        MARK: mark,
    }
    script = str(requires.REPO / "ops" / "slurm" / "miner.sbatch")
    job = slurm.run("sbatch", "--parsable", f"--chdir={tmp_path}", script)
    log = tmp_path / f"miner-{job}.log"

    def found_lines(pattern: str) -> list[str]:
        return re.findall(pattern, log.read_text(errors="replace")) if log.exists() else []

    def wait_for(pattern: str, count: int, seconds: float = 120) -> list[str]:
        until(
            lambda: len(found_lines(pattern)) >= count,
            seconds,
            lambda: f"{count} x {pattern}: {log.read_text()[-3000:] if log.exists() else 'no log'}",
        )
        return found_lines(pattern)

    # A rank is killed: both guards restart in place, and the job keeps its nodes.
    first = wait_for(r"rank \d pid (\d+) begins after step 0\b", 2)
    wait_for(r"Inner Step: 5 ", 1)
    os.kill(int(first[0]), signal.SIGKILL)
    wait_for(r"rank \d pid \d+ begins", 4)
    assert slurm.state_of(job) == "RUNNING"

    def queued_again() -> None:
        until(lambda: slurm.state_of(job) == "PENDING", 60, lambda: slurm.state_of(job))
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    # The job is preempted: the ranks save, the job goes back to the queue and continues there.
    wait_for(r"Inner Step: 20 ", 1)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    wait_for(r"rank 0 saved step \d+", 1)
    queued_again()
    # The guard saves again when Slurm ends the job.
    saved = found_lines(r"rank 0 saved step (\d+)")[-1]
    wait_for(rf"begins after step {saved}\b", 2, 200)

    # A GPU falls off the bus, and a restart does not help: the guard drains its node.
    begun = len(wait_for(r"begins after", 6))
    broken = slurm.nodes_of(job)[0]
    (tmp_path / f"nvml-{broken}").write_text("count=1\nxid.0=79\n")
    wait_for(rf"HOST WARNING: Slurm drains {broken}: gpu_hardware", 1)
    queued_again()
    wait_for(r"begins after", begun + 4, 200)
    assert broken not in slurm.nodes_of(job)
    assert "miner-guard: gpu_hardware" in slurm.run("scontrol", "show", "node", broken)
    (tmp_path / f"nvml-{broken}").write_text("count=1\n")
    slurm.run("scontrol", "update", f"NodeName={broken}", "State=RESUME")

    # A node is lost: the job continues on the free one.
    lost = slurm.nodes_of(job)[-1]
    slurm.run("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=test")
    begun = len(found_lines(r"begins after"))
    queued_again()
    wait_for(r"begins after", begun + 2, 200)
    assert lost not in slurm.nodes_of(job)

    # A cancelled job leaves no process.
    slurm.run("scancel", job)
    until(lambda: slurm.state_of(job) in ("", "CANCELLED"), 60, lambda: slurm.state_of(job))
    until(lambda: not left(mark), 30, lambda: f"no process left: {left(mark)}")
    assert len(found_lines(r"GUARD STOPPED")) >= 2
