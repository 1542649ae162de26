"""ops/slurm/miner.sbatch on a real Slurm: a rank killed, a node drained, a preemption, a node lost,
a cancelled job."""

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
from tests.support.slurm import Slurm, cluster
from tests.support.waiting import until

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
    dist.all_reduce(state["weight"])
    state["step"][0] = step
    guard.step(outer_step=1, inner_step=step, loss=3.0, lr=1e-3)
    if checkpoints.due(step, asked=guard.checkpoint_requested()):
        checkpoints.save(step, state)
        checkpoints.wait()
        print(f"{me} saved step {step}", flush=True)
"""


def left(mark: str) -> list[str]:
    """Command lines of the job's processes that are still running."""
    return [words for _, words in living(mark) if "slurm" not in words]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if os.geteuid() != 0:
        pytest.skip("only root can start slurmd")
    with cluster(tmp_path, ["n1", "n2", "n3"]) as started:
        yield started


@pytest.mark.long
@pytest.mark.timeout(580)
def test_a_job_outlives_a_rank_a_preemption_and_a_node_and_leaves_nothing(
    tmp_path: Path, slurm: Slurm
) -> None:
    requires.module("torch")
    mark = uuid.uuid4().hex
    (tmp_path / "train.py").write_text(TRAIN)
    slurm.env |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TRAIN": str(tmp_path / "train.py"),
        "CHECKPOINTS": str(tmp_path / "checkpoints"),
        "STATE": str(tmp_path / "state"),
        "HEAD": "127.0.0.1",
        "CHECKPOINT_S": "8",
        "MINER_GUARD_GPU__PREFLIGHT": "false",
        "MINER_GUARD_RESTART__BACKOFF_S": "0.5",
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

    # A node is drained and the job preempted: the ranks save, the job goes back to the queue and
    # continues at that step, without the node.
    wait_for(r"Inner Step: 20 ", 1)
    drained = slurm.nodes_of(job)[-1]
    slurm.run("scontrol", "update", f"NodeName={drained}", "State=DRAIN", "Reason=test")
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    step = wait_for(r"rank 0 saved step (\d+)", 1)[-1]
    until(lambda: slurm.state_of(job) == "PENDING", 60, "the requeue")
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_for(rf"begins after step {step}\b", 2, 200)
    assert drained not in slurm.nodes_of(job)
    slurm.run("scontrol", "update", f"NodeName={drained}", "State=RESUME")

    # A node is lost: the job continues on the free one.
    lost = slurm.nodes_of(job)[-1]
    slurm.run("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=test")
    until(lambda: slurm.state_of(job) == "PENDING", 60, lambda: slurm.state_of(job))
    begun = len(found_lines(r"begins after"))
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_for(r"begins after", begun + 2, 200)
    assert lost not in slurm.nodes_of(job)
    assert found_lines(rf"begins after step {step}\b")[-2:]

    # A cancelled job leaves no process.
    slurm.run("scancel", job)
    until(lambda: slurm.state_of(job) in ("", "CANCELLED"), 60, lambda: slurm.state_of(job))
    until(lambda: not left(mark), 30, lambda: f"no process left: {left(mark)}")
    assert len(found_lines(r"GUARD STOPPED")) >= 2
