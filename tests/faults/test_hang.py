"""Hangs: the guard detects them in time, names the culprit, keeps the evidence and restarts the
miner."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.faults.guarded import Guarded, until
from tests.support import requires
from tests.support.launcher import launch

FAST = {
    "miner.stop_timeout_s": 3,
    "restart.backoff_s": 0.1,
    "hang.min_s": 2,
    "hang.first_step_s": 20,
    "hang.exit_s": 3,
}


def evidence(guarded: Guarded) -> Path:
    folders = sorted(guarded.state.incidents.glob("*-hang"))
    assert folders
    return folders[0]


def test_a_rank_that_stops_stepping_is_named_documented_and_restarted(guarded: Guarded) -> None:
    guarded.start(guarded.miner("steps", 5, 0.1, "hang"), "--max-restarts", "1", settings=FAST)
    hang = guarded.wait_for("hang_detected", seconds=60)
    assert "rank 0 in data for" in hang["msg"]
    assert "at steps.py:" in hang["msg"]
    assert hang["culprits"] == [0]
    assert 2.0 <= hang["idle_s"] < 10.0
    guarded.wait_for("miner_restarting", seconds=60)
    dump = guarded.named("stack_dump")[0]
    assert Path(dump["path"]) == evidence(guarded)
    stacks = (evidence(guarded) / "stacks-rank-0000.txt").read_text()
    assert "steps.py" in stacks
    story = json.loads((evidence(guarded) / "hang.json").read_text())
    assert story["ranks"]["0"]["now"]["phase"] == "data"
    assert story["ranks"]["0"]["kernel"]["state"].startswith("sleeping")
    assert guarded.stop() in (0, 75)
    guarded.assert_nothing_left()


def late(guarded: Guarded, *arguments: object) -> list[str]:
    requires.module("torch")
    _, _, *miner = guarded.miner("late", *arguments)
    return launch(2, *miner)


def test_a_rank_that_is_too_late_to_agree_is_a_hang_although_all_ranks_step(
    guarded: Guarded,
) -> None:
    """The group that the ranks use to agree stays broken, so they could train for a day without
    being allowed to upload."""
    settings = {**FAST, "hang.min_s": 120, "gate.broadcast_timeout_s": 2}
    guarded.start(late(guarded, 6, "all"), "--max-restarts", "1", settings=settings)
    hang = guarded.wait_for("hang_detected", seconds=90)
    assert hang["culprits"] == [1]
    assert "rank 1 in data for" in hang["msg"]
    assert "cannot agree on uploads for the rest" in hang["msg"]
    assert "hang: rank 1 in data" in guarded.wait_for("miner_restarting", seconds=60)["msg"]
    assert "late.py" in (evidence(guarded) / "stacks-rank-0001.txt").read_text()
    assert guarded.stop() in (0, 75)
    guarded.assert_nothing_left()


def test_a_program_that_asks_on_only_one_rank_gets_a_report_and_no_restart(
    guarded: Guarded,
) -> None:
    settings = {**FAST, "hang.min_s": 120, "gate.broadcast_timeout_s": 2}
    guarded.start(late(guarded, 0, "alone"), settings=settings)
    degraded = guarded.wait_for("guard_degraded", seconds=90)
    assert "every rank must ask at the same step" in degraded["msg"]
    time.sleep(3)
    assert not guarded.named("hang_detected")
    assert guarded.stop() == 0
    guarded.assert_nothing_left()


def without_py_spy(guarded: Guarded, folder: Path) -> dict[str, str]:
    """An environment without py-spy: none on PATH, and none next to the guard's interpreter."""
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())
    path = [str(p) for p in map(Path, os.environ["PATH"].split(":")) if not (p / "py-spy").exists()]
    guarded.python = str(python)
    return {"PATH": ":".join(path), "PYTHONPATH": ":".join([os.getcwd(), *filter(None, sys.path)])}


def test_without_py_spy_the_rank_writes_its_stacks_itself(guarded: Guarded, tmp_path: Path) -> None:
    env = without_py_spy(guarded, tmp_path)
    guarded.start(
        guarded.miner("steps", 3, 0.1, "hang"), settings={**FAST, "hang.action": "warn"}, env=env
    )
    guarded.wait_for("stack_dump", seconds=60)
    assert (
        json.loads((evidence(guarded) / "hang.json").read_text())["ranks"]["0"]["stacks"]
        == "faulthandler"
    )
    assert "steps.py" in (evidence(guarded) / "stacks-rank-0000.txt").read_text()
    assert guarded.stop() == 0
    guarded.assert_nothing_left()


def test_a_hang_of_a_program_followed_only_by_its_lines_is_found(guarded: Guarded) -> None:
    lines = (
        "import time\nfor i in range(5): print(f'iter {i}: loss 2.5, time 9.0ms', "
        "flush=True); time.sleep(.1)"
    )
    command = [sys.executable, "-c", f"{lines}\ntime.sleep(600)", guarded.token]
    guarded.start(command, "--attach", "log", settings={**FAST, "hang.action": "stop"})
    hang = guarded.wait_for("hang_detected", seconds=60)
    assert hang["culprits"] == [0]
    assert hang["idle_s"] >= FAST["hang.min_s"]
    assert guarded.processes[0].wait(60) == 75
    guarded.assert_nothing_left()


def test_a_process_that_outlives_its_training_loop_is_a_hang(guarded: Guarded) -> None:
    guarded.start(
        guarded.miner("steps", 3, 0.1, "linger"), settings={**FAST, "hang.action": "stop"}
    )
    hang = guarded.wait_for("hang_detected", seconds=60)
    assert "the miner's process is still running" in hang["msg"]
    assert guarded.processes[0].wait(60) == 75
    guarded.assert_nothing_left()


def test_a_finished_miner_that_hangs_at_its_exit_has_finished(guarded: Guarded) -> None:
    """Otherwise a finished training run would start from scratch again and again."""
    guarded.start(guarded.miner("steps", 3, 0.1, "done"), settings=FAST)
    assert guarded.processes[0].wait(60) == 0, guarded.tail()
    assert "as requested" not in guarded.named("miner_finished")[0]["msg"]
    assert len(guarded.named("miner_started")) == 1
    guarded.assert_nothing_left()


def test_a_hang_before_the_hook_is_called_is_reported_like_any_other(guarded: Guarded) -> None:
    settings = {**FAST, "hang.first_step_s": 12, "hang.action": "stop"}
    guarded.start(guarded.miner("steps", 3, 0.1, "asleep"), settings=settings)
    hang = guarded.wait_for("hang_detected", seconds=60)
    assert "no rank has called init()" in hang["msg"]
    assert guarded.processes[0].wait(60) == 75
    assert not [e for e in guarded.named("guard_degraded") if "no step seen" in e["msg"]]
    guarded.assert_nothing_left()


EARLY = """
import sys, time
import torch.optim.optimizer
def rendezvous():
    time.sleep(600)
rendezvous()
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_hang_before_init_names_the_line_without_py_spy(
    guarded: Guarded, tmp_path: Path, stopped: bool
) -> None:
    """Under --attach a process can dump its stacks as soon as it has imported torch, so a hang in
    `init_process_group` has stacks, too. The torch here is an empty module, which imports at
    once."""
    package = tmp_path / "lib" / "torch" / "optim"
    package.mkdir(parents=True)
    for module in (package.parent / "__init__.py", package / "__init__.py"):
        module.touch()
    (package / "optimizer.py").touch()
    script = tmp_path / "early.py"
    script.write_text(EARLY)
    env = without_py_spy(guarded, tmp_path)
    env["PYTHONPATH"] = f"{tmp_path / 'lib'}:{env['PYTHONPATH']}"
    settings = {**FAST, "hang.first_step_s": 8, "hang.action": "stop"}
    command = [sys.executable, str(script), guarded.token]
    guarded.start(command, "--attach", "auto", settings=settings, env=env)
    launch = guarded.wait_for("miner_started", seconds=60)
    if stopped:
        until(lambda: list(guarded.state.flight.glob("early-*.stacks")), 30, guarded.tail)
        os.kill(launch["pid"], signal.SIGSTOP)
    hang = guarded.wait_for("hang_detected", seconds=60)
    if stopped:
        assert f"its process is stopped (state T) (pid {launch['pid']})" in hang["msg"]
    else:
        assert f"at early.py:5 (pid {launch['pid']})" in hang["msg"]
        dump = guarded.wait_for("stack_dump")
        stacks = Path(dump["path"]) / f"stacks-pid-{launch['pid']}.txt"
        assert "in rendezvous" in stacks.read_text()
    assert guarded.processes[0].wait(60) == 75
    guarded.assert_nothing_left()


def two_ranks(guarded: Guarded, first: str, second: str) -> list[str]:
    """Two ranks under a shell that waits for both, whatever happens to either of them."""

    def rank(number: int, then: str) -> str:
        variables = f"RANK={number} LOCAL_RANK={number} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2"
        return f"{variables} {shlex.join(guarded.miner('steps', 15, 0.05, then))} &"

    return ["sh", "-c", f"{rank(0, first)} {rank(1, second)} wait", guarded.token]


def test_a_killed_rank_is_named_within_seconds_although_its_launcher_waits(
    guarded: Guarded,
) -> None:
    """Otherwise a rank could be dead for five minutes before anything is printed."""
    settings = {**FAST, "hang.min_s": 120, "hang.action": "stop"}
    guarded.start(two_ranks(guarded, "waits", "killed"), settings=settings)
    gone = guarded.wait_for("rank_gone", seconds=60)
    assert gone["rank"] == 1
    assert "rank 1 died at step 15" in gone["msg"]
    hang = guarded.wait_for("hang_detected", seconds=60)
    assert hang["culprits"] == [1]
    assert "rank 1 is gone, rank 0 waiting in backward" in hang["msg"]
    assert guarded.processes[0].wait(60) == 75
    guarded.assert_nothing_left()


def test_a_rank_that_ends_with_0_in_the_middle_is_named(guarded: Guarded) -> None:
    guarded.start(two_ranks(guarded, "waits", "exit0"), settings={**FAST, "hang.min_s": 120})
    gone = guarded.wait_for("rank_gone", seconds=60)
    assert "rank 1 ended with code 0 at step 15, before rank 0" in gone["msg"]
    assert guarded.stop() == 0
    guarded.assert_nothing_left()


def test_a_failed_loop_whose_process_keeps_running_is_a_hang_with_a_cause(guarded: Guarded) -> None:
    guarded.start(
        guarded.miner("steps", 3, 0.1, "fail"),
        settings={**FAST, "hang.action": "stop", "hang.min_s": 5},
    )
    hang = guarded.wait_for("hang_detected", seconds=60)
    assert hang["detail"].endswith("; before it: INCIDENT cuda_oom")
    assert guarded.processes[0].wait(60) == 75
    guarded.assert_nothing_left()


def test_a_stopped_rank_is_reported_in_words(guarded: Guarded) -> None:
    guarded.start(
        guarded.miner("steps", 100000, 0.1, "exit0"), settings={**FAST, "hang.action": "warn"}
    )
    guarded.wait_for("inner_step", 3, seconds=60)
    pid = guarded.named("miner_started")[0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    guarded.wait_for("stack_dump", seconds=60)
    state = json.loads((evidence(guarded) / "hang.json").read_text())["ranks"]["0"]["kernel"][
        "state"
    ]
    assert state.startswith("stopped by a signal")
    assert "its process is stopped (state T)" in guarded.named("hang_detected")[0]["msg"]
    assert guarded.stop() == 0
    guarded.assert_nothing_left()


def test_a_suspended_guard_and_miner_are_not_a_hang(guarded: Guarded) -> None:
    settings = {**FAST, "hang.min_s": 4}
    guard = guarded.start(guarded.miner("steps", 100000, 0.1, "exit0"), settings=settings)
    guarded.wait_for("inner_step", 3, seconds=60)
    pid = guarded.named("miner_started")[0]["pid"]
    everything = [guard.pid, guarded.keeper_pid, guarded.guard_pid, pid]
    for target in everything:
        os.kill(target, signal.SIGSTOP)
    # Longer than the limit, and too long to pass for a late timer.
    time.sleep(17)
    for target in reversed(everything):
        os.kill(target, signal.SIGCONT)
    steps = len(guarded.named("inner_step"))
    until(lambda: len(guarded.named("inner_step")) > steps + 5, 60, "further steps")
    assert not guarded.named("hang_detected")
    assert guarded.stop() == 0
    guarded.assert_nothing_left()
