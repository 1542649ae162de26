"""Faults in two FSDP ranks of the demo miner, with real signals, and with torchrun where it
matters."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.faults.guarded import Guarded, living, until
from tests.support import requires
from tests.support.launcher import TRAINING, free_port, launch
from tests.support.present_state import status_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FAST = {
    "miner.stop_timeout_s": 40,
    "restart.backoff_s": 0.1,
    "hang.min_s": 4,
    "hang.first_step_s": 240,
    "health.snapshot_every_s": 600,
    "logs.step_lines_per_s": 100,
}
SLOWEST = 300.0


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def demo(guarded: Guarded, tmp_path: Path, *flags: str, steps: int = 30) -> list[str]:
    requires.module("torch")
    return [
        "-m",
        "miner_guard.demo.train",
        "--work",
        str(tmp_path / f"work-{guarded.token}"),
        "--steps",
        str(steps),
        "--effective-batch-size",
        "8",
        "--batch-size",
        "4",
        "--checkpoint-every",
        "5",
        "--upload-steps",
        "1000",
        "--inner-steps-per-outer",
        "1000",
        *flags,
    ]


def ranks(guarded: Guarded) -> dict[int, int]:
    """Pid by rank, as reported by the running guard."""

    def ask() -> dict[int, int]:
        document = status_of(guarded.state.root)
        found = {int(rank): known["pid"] for rank, known in document["rank_processes"].items()}
        return found if len(found) == 2 else {}

    result: dict[int, int] = until(ask, 60, "both ranks in the status")
    return result


def stepping(guarded: Guarded, count: int = 3) -> None:
    guarded.wait_for("inner_step", count, seconds=SLOWEST)


def finished(guarded: Guarded) -> None:
    assert guarded.processes[0].wait(SLOWEST) == 0, guarded.tail()
    assert guarded.named("miner_finished")
    guarded.assert_nothing_left()


def test_a_hung_rank_is_named_and_the_miner_resumes_from_its_checkpoint(
    guarded: Guarded, tmp_path: Path
) -> None:
    """A stop afterwards gives the ranks time for their checkpoint."""
    miner = demo(guarded, tmp_path, "--fault", "hang@12:1", steps=100000)
    # The hung rank outlives its SIGTERM.
    guarded.start(
        launch(2, *miner, imports=TRAINING), settings={**FAST, "miner.stop_timeout_s": 20}
    )
    hang = guarded.wait_for("hang_detected", seconds=SLOWEST)
    assert hang["culprits"] == [1]
    assert "rank 1 in data for" in hang["detail"]
    assert "rank 0 waiting" in hang["detail"]
    folder = Path(guarded.wait_for("stack_dump")["path"])
    assert guarded.named("stack_dump")[0]["late_in_collective"] == [1]
    assert "train" in (folder / "stacks-rank-0001.txt").read_text()
    # Snapshots in memory at every step, and a hang in the 12th: a restart loses one at most.
    resumed = guarded.wait_for("checkpoint", seconds=SLOWEST, line="CHECKPOINT RESUMED")
    assert resumed["step"] in (10, 11)
    ended = guarded.named("orphan_killed")
    stepping(guarded, len(guarded.named("inner_step")) + 1)
    assert guarded.stop(signal.SIGTERM) == 0, guarded.tail()
    names = [event["event"] for event in guarded.events]
    assert names.count("miner_started") == 2
    assert "checkpoint" in names[names.index("miner_stopping") :]
    assert guarded.named("orphan_killed") == ended, "the ranks ended by themselves"
    guarded.assert_nothing_left()
    assert not guarded.state.memory.exists(), "the guard has ended, and gives the memory back"


@pytest.mark.long
def test_ranks_that_all_exit_with_0_too_early_are_a_failure(
    guarded: Guarded, tmp_path: Path
) -> None:
    guarded.start(
        [*TORCHRUN, *demo(guarded, tmp_path, "--fault", "exit0@6", steps=9)], settings=FAST
    )
    ended = guarded.wait_for("miner_exited", seconds=SLOWEST)
    assert "MINER EXITED: code 0 without being asked" in ended["msg"]
    finished(guarded)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["sigkill@6:1", "crash@6:0", "oom@6:1"])
def test_a_rank_that_dies_ends_the_launch_and_the_next_one_finishes(
    guarded: Guarded, tmp_path: Path, fault: str
) -> None:
    guarded.start([*TORCHRUN, *demo(guarded, tmp_path, "--fault", fault, steps=9)], settings=FAST)
    guarded.wait_for("miner_exited", seconds=SLOWEST)
    finished(guarded)


def test_torchrun_or_the_guard_killed_leaves_no_rank_behind(
    guarded: Guarded, tmp_path: Path
) -> None:
    guarded.start([*TORCHRUN, *demo(guarded, tmp_path, steps=100000)], settings=FAST)
    stepping(guarded)
    pids = ranks(guarded)
    os.kill(guarded.named("miner_started")[0]["pid"], signal.SIGKILL)
    guarded.wait_for("miner_started", 2, seconds=60)
    assert not [pid for pid, _ in living(guarded.token) if pid in pids.values()]
    stepping(guarded, len(guarded.named("inner_step")) + 1)
    guarded.processes[0].kill()
    guarded.processes[0].wait()
    guarded.assert_nothing_left(60)


@pytest.mark.long
def test_a_damaged_checkpoint_is_skipped_with_a_line(guarded: Guarded, tmp_path: Path) -> None:
    guarded.start([*TORCHRUN, *demo(guarded, tmp_path, steps=11)], settings=FAST)
    assert guarded.processes[0].wait(SLOWEST) == 0, guarded.tail()
    newest = max(tmp_path.glob("work-*/checkpoints/step-*"))
    for file in newest.glob("*.distcp"):
        os.truncate(file, file.stat().st_size // 2)
    guarded.start([*TORCHRUN, *demo(guarded, tmp_path, steps=14)], settings=FAST)
    assert guarded.processes[1].wait(SLOWEST) == 0, guarded.tail()
    assert guarded.named("checkpoint", "CHECKPOINT SKIPPED")[0]["path"].endswith(newest.name)
    assert guarded.named("checkpoint", "CHECKPOINT RESUMED")[0]["step"] == 5
    guarded.assert_nothing_left()


ELASTIC = str(Path(__file__).with_name("miners") / "elastic.py")
PATIENT = {**FAST, "hang.min_s": 120}
"""A rank that fails may take seconds to end, on a loaded machine more than FAST allows."""


@pytest.mark.long
def test_failures_that_torchrun_handles_itself_are_restarts_each_with_its_cause(
    guarded: Guarded, tmp_path: Path
) -> None:
    requires.module("torch")
    faults = [
        "1=CUDA out of memory. Tried to allocate 2.00 GiB",
        "0=[Errno 28] No space left on device",
    ]
    command = [*TORCHRUN, "--max-restarts=5", ELASTIC, str(tmp_path), *faults]
    guarded.start(command, settings=PATIENT)
    guarded.wait_for("ranks_restarted", 2, seconds=SLOWEST)
    guarded.wait_for("incident", 2)
    assert [event["label"] for event in guarded.named("incident")] == ["cuda_oom", "disk_full"]
    # The ranks may also fail to meet again, which torchrun counts too.
    count, generation = (guarded.named("ranks_restarted")[-1][k] for k in ("count", "generation"))
    assert count == generation >= 2
    until(lambda: status_of(guarded.state.root).get("restarts") == count, 30, "the status")
    assert len(guarded.named("miner_started")) == 1
    assert guarded.stop() == 0


@pytest.mark.long
def test_a_node_that_joins_and_leaves_is_membership_and_no_fault(tmp_path: Path) -> None:
    """torch 2.13 lets a node join only with its own store: without the variable, the agents that
    run already time out."""
    requires.module("torch")
    port, agents = free_port(), [Guarded(tmp_path / name) for name in "ab"]
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic"]
    command = [*TORCHRUN[:3], "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5", *where]
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    first, second = agents
    try:
        for agent in agents:
            agent.output.parent.mkdir()
            agent.start([*command, ELASTIC, str(tmp_path)], settings=PATIENT, env=store)
            agent.wait_for("inner_step", 5, seconds=SLOWEST)
        grown = first.wait_for("ranks_restarted", seconds=SLOWEST)
        second.stop()
        shrunk = first.wait_for("ranks_restarted", 2, seconds=SLOWEST)
        sizes = [(e["level"], e["world_size_before"], e["world_size"]) for e in (grown, shrunk)]
        assert sizes == [("info", 1, 2), ("info", 2, 1)]
        steps = len(first.named("inner_step"))
        first.wait_for("inner_step", steps + 5, seconds=SLOWEST)
        alarms = ("incident", "rank_gone", "hang_detected", "miner_exited")
        assert [name for name in alarms if first.named(name)] == []
    finally:
        for agent in agents:
            agent.clean()
