"""Training scripts that know nothing of the guard: when they have finished, and who is to blame."""

from __future__ import annotations

import sys

from tests.faults.guarded import Guarded
from tests.support import requires

FAST = {"miner.stop_timeout_s": 3, "restart.backoff_s": 0.1, "hang.min_s": 60}


def start(guarded: Guarded, then: str, *flags: str, ranks: int = 0) -> None:
    requires.module("torch")
    command = guarded.miner("trainer", 30, then)
    if ranks:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command = [sys.executable, *torchrun, *command[2:]]
    guarded.start(command, "--attach", "auto", "--max-restarts", "1", *flags, settings=FAST)


def test_a_training_that_ran_to_its_end_is_not_started_again(guarded: Guarded) -> None:
    """Guards against five trainings from scratch and a CRASH LOOP, for a script that is done."""
    start(guarded, "ends")
    assert guarded.processes[0].wait(120) == 0, guarded.tail()
    assert guarded.named("miner_finished")
    assert len(guarded.named("miner_started")) == 1
    guarded.assert_nothing_left()


def test_a_training_that_never_ends_by_itself_is_started_again(guarded: Guarded) -> None:
    start(guarded, "ends", "--no-finite")
    assert guarded.processes[0].wait(120) == 75, guarded.tail()
    assert len(guarded.named("miner_started")) == 2
    guarded.assert_nothing_left()


def test_a_loop_that_prints_its_exception_and_exits_with_0_has_not_finished(
    guarded: Guarded,
) -> None:
    start(guarded, "catches")
    assert guarded.processes[0].wait(120) == 75, guarded.tail()
    assert not guarded.named("miner_finished")
    guarded.assert_nothing_left()


def test_the_rank_that_left_is_named_and_not_the_network(guarded: Guarded) -> None:
    """Guards against `INCIDENT nccl_network_error on rank 0` for a rank 1 that ended its loop."""
    start(guarded, "leaves", "--no-restart", ranks=2)
    assert guarded.processes[0].wait(120) not in (0, None), guarded.tail()
    gone = guarded.named("rank_gone")
    assert [e["rank"] for e in gone] == [1], guarded.tail()
    assert "rank 1 ended with code 0 at step 15" in gone[0]["msg"]
    assert [e["label"] for e in guarded.named("incident")] == ["rank_lost"]
    guarded.assert_nothing_left()
