"""Training scripts without the hook: the guard can tell whether they have finished and which rank
is to blame."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.guarded import Guarded
from tests.support import requires

FAST = {"miner.stop_timeout_s": 3, "restart.backoff_s": 0.1, "hang.min_s": 60}


def start(guarded: Guarded, then: str, *flags: str, ranks: int = 0) -> None:
    requires.module("torch")
    command = guarded.miner("trainer", 30, then)
    if ranks:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command = [sys.executable, *torchrun, *command[2:]]
    guarded.start(command, "--attach", "auto", *flags, settings=FAST)


def test_a_training_that_ran_to_its_end_is_not_restarted(guarded: Guarded) -> None:
    """Otherwise a finished script would start from scratch five times and end in a CRASH LOOP."""
    start(guarded, "ends", "--max-restarts", "1")
    assert guarded.processes[0].wait(120) == 0, guarded.tail()
    assert guarded.named("miner_finished")
    assert len(guarded.named("miner_started")) == 1


def test_a_training_that_never_ends_on_its_own_has_not_finished(guarded: Guarded) -> None:
    start(guarded, "ends", "--no-finite", "--max-restarts", "0")
    assert guarded.processes[0].wait(120) == 75, guarded.tail()
    assert guarded.named("crash_loop")
    assert not guarded.named("miner_finished")


def test_a_loop_that_prints_its_exception_and_exits_with_0_has_not_finished(
    guarded: Guarded,
) -> None:
    start(guarded, "catches", "--max-restarts", "0")
    assert guarded.processes[0].wait(120) == 75, guarded.tail()
    assert not guarded.named("miner_finished")


def test_the_rank_that_left_is_named_and_not_the_network(guarded: Guarded) -> None:
    """The guard must not report `INCIDENT nccl_network_error on rank 0` when rank 1 has ended its
    loop."""
    start(guarded, "leaves", "--no-restart", ranks=2)
    assert guarded.processes[0].wait(120) not in (0, None), guarded.tail()
    gone = guarded.named("rank_gone")
    assert [e["rank"] for e in gone] == [1], guarded.tail()
    assert "rank 1 ended with code 0 at step 15" in gone[0]["msg"]
    assert [e["label"] for e in guarded.named("incident")] == ["rank_lost"]


SCRIPTS = Path(__file__).parents[1] / "integration" / "scripts"
FAULTS = {
    "raises": ("incident", "code_bug", "code_bug"),
    "killed": ("incident", "process_killed", "process_killed"),
    "stopped": ("hang_detected", "its process is stopped (state T)", "hang"),
    "hangs": ("hang_detected", "at inject.py:", "hang"),
    "leaves": ("rank_gone", "rank 1 ended with code 0 at step", "rank_lost"),
}
"""By fault: the event that names it, words from its line, and the root cause according to
`explain`."""

MODULES = {"with_accelerate": "accelerate", "with_transformers": "transformers"}
TRAINERS = [("plain", 2), ("with_accelerate", 0), ("with_transformers", 0)]
LAUNCHED = [("plain", 2), ("with_accelerate", 2), ("with_transformers", 2)]
"""Scripts with their number of ranks under torchrun; 0 without it."""


def start_foreign(
    guarded: Guarded, fault: str, trainer: str, ranks: int, settings: dict[str, Any], **env: str
) -> int:
    """Run a guard over a foreign trainer with the fault; returns the guard's exit code."""
    requires.module(MODULES.get(trainer, "torch"))
    out = guarded.state.root.parent / "out"
    script = [fault, str(SCRIPTS / f"{trainer}.py"), str(out)]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    inject = str(Path(__file__).with_name("miners") / "inject.py")
    command = [sys.executable, *(launcher if ranks else []), inject, *script]
    guarded.start(
        command,
        "--attach",
        "auto",
        "--no-restart",
        settings={"miner.stop_timeout_s": 3, **settings},
        env={"OMP_NUM_THREADS": "1", **env},
    )
    return guarded.processes[0].wait(150)


def explained(guarded: Guarded) -> str:
    """The answer that `explain` gives for the guard's own log after the run."""
    explain = [sys.executable, "-m", "miner_guard", "explain", "--state-dir"]
    answer = subprocess.run(
        [*explain, str(guarded.state.root)], capture_output=True, text=True, env=dict(os.environ)
    )
    return answer.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "trainer", "ranks"),
    [(fault, *each) for fault in FAULTS for each in (LAUNCHED if fault == "leaves" else TRAINERS)],
)
def test_a_fault_in_a_third_party_trainer_is_named_live_and_afterwards(
    guarded: Guarded, fault: str, trainer: str, ranks: int
) -> None:
    """In training loops that we did not write, the guard must not report `host_oom_kill` for a kill
    -9, a hang without its location, or a network error for a rank that left."""
    event, words, label = FAULTS[fault]
    settings = {"hang.min_s": 8, "hang.action": "stop"}
    assert start_foreign(guarded, fault, trainer, ranks, settings) != 0, guarded.tail()
    named = guarded.named(event)
    assert named, guarded.tail()
    assert words in named[0]["msg"]
    assert named[0]["rank"] == (1 if ranks else None if event == "incident" else 0)
    assert words in guarded.output.read_text()
    answer = explained(guarded)
    assert answer.startswith(f"ROOT CAUSE {label} "), answer


@pytest.mark.long
@pytest.mark.parametrize(
    ("trainer", "phase"),
    [("plain", "no named phase"), ("with_accelerate", "data"), ("with_fsdp", "data")],
)
def test_a_slow_rank_of_a_third_party_trainer_is_named_live_and_afterwards(
    guarded: Guarded, trainer: str, phase: str
) -> None:
    """A rank that is 2.5 times as slow must not go unnoticed for seventy steps: all ranks wait for
    it, so their steps take equally long."""
    assert start_foreign(guarded, "slow", trainer, 2, {}, STEPS="115") == 0, guarded.tail()
    named = guarded.named("straggler")
    assert {(e["rank"], e["phase"]) for e in named[:-1]} == {(1, phase)}, guarded.tail()
    assert (named[-1]["rank"], named[-1]["level"]) == (1, "info")
    console = guarded.output.read_text()
    assert "STRAGGLER: rank 1 is busy" in console
    assert f"slow in {phase}" in console
    answer = explained(guarded)
    assert answer.startswith("ROOT CAUSE straggler "), answer
    assert "STRAGGLER: rank 1 is busy" in answer
