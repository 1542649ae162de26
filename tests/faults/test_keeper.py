"""Training outlives its guard: the keeper owns the miner, and whichever of the two is killed, no
process and no output is lost that could have been saved."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from miner_guard import __version__
from miner_guard.guard.control_socket import ask
from tests.faults.guarded import REPO, Guarded, lives, living, until
from tests.faults.seccomp import MEMFD_CREATE, refuse
from tests.support.present_state import status_of

FAST = {"miner.stop_timeout_s": 3, "restart.backoff_s": 0.1}
STEPS = {**FAST, "logs.step_lines_per_s": 1000}


def steps(guarded: Guarded) -> list[int]:
    return [event["inner_step"] for event in guarded.named("inner_step")]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_training_continues_with_the_same_pid_whenever_the_guard_is_killed(
    guarded: Guarded, seed: int
) -> None:
    """An OOM kill of the guard once cost hours of training between two checkpoints."""
    moments = random.Random(seed)
    kills = 5 if seed == 1 else 40
    guarded.start(guarded.miner("steps", 10**6, 0.02, "finish"), settings=STEPS)
    miner = guarded.miner_pid
    guarded.wait_for("inner_step")
    for kill in range(kills):
        before = guarded.guard_pid
        os.kill(before, signal.SIGKILL)
        until(lambda before=before: guarded.guard_pid != before, 30, guarded.tail)
        guarded.wait_for("guard_killed", kill + 1)
        time.sleep(moments.random() * 2)
    count = len(steps(guarded))
    until(lambda: len(steps(guarded)) > count + 20, 30, guarded.tail)
    assert lives(miner)
    assert len(guarded.named("miner_started")) == 1
    assert status_of(guarded.state.root)["pid"] == miner
    recorded = steps(guarded)
    missing = set(range(min(recorded), max(recorded) + 1)) - set(recorded)
    assert not missing, f"{len(missing)} steps are not in the record"
    assert guarded.stop() == 0
    guarded.assert_nothing_left(0.5)


_HIDDEN = 'mount -t tmpfs -o ro none "$0"; exec "$@"'
NAMESPACES = {
    "no namespace": [],
    "another network": ["unshare", "-n"],
    # Not as the namespace's first process, which no signal of its own kills.
    "another pid namespace": ["unshare", "-pf", "--mount-proc", "sh", "-c", '"$0" "$@"; exit $?'],
    "no state directory": ["unshare", "-m", "sh", "-c", _HIDDEN],
}


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_all_steps_of_a_rank_that_dies_at_once_are_in_the_record(
    guarded: Guarded, namespace: str
) -> None:
    """Of five steps in its first half second, none was seen: the guard had to find the rank first,
    by its files and its pid."""
    around = NAMESPACES[namespace]
    unshare = list(itertools.takewhile(lambda word: word != "sh", around))
    if unshare and subprocess.run([*unshare, "true"], check=False).returncode:
        pytest.skip("this user, or a chroot, can't create these namespaces")
    around = [*around, str(guarded.state.root)] if namespace == "no state directory" else around
    command = [*around, *guarded.miner("steps", 5, 0.01, "killed")]
    guarded.start(command, "--no-restart", settings=STEPS)
    assert guarded.processes[0].wait(60) == 137, guarded.tail()
    assert steps(guarded) == [1, 2, 3, 4, 5]


HIDING = """#!/bin/sh
exec unshare -m sh -c 'mount -t proc -o hidepid=2 none /proc && exec {caps} "$@"' sh {python} "$@"
"""
FEW_CAPABILITIES = (
    *("setpriv", "--regid=65534", "--clear-groups", "--inh-caps=-all"),
    "--bounding-set=-all,+setuid,+setgid",
)
OTHER_USER = """
import os, time, miner_guard
guard = miner_guard.init()
guard.step(inner_step=1)
os.setresuid(0, 65534, 65534)
for n in range(2, 10**6):
    time.sleep(0.05)
    guard.step(inner_step=n)
"""


def test_a_miner_that_proc_hides_lives_on_and_ends_with_the_run(
    guarded: Guarded, tmp_path: Path
) -> None:
    """A set-uid miner under hidepid was said to have exited while it trained, and later no signal
    reached it."""
    caps = [*FEW_CAPABILITIES, "true"]
    if shutil.which("setpriv") is None or subprocess.run(["unshare", "-m", *caps]).returncode:
        pytest.skip("this user, or a chroot, can't create these namespaces")
    python = tmp_path / "python"
    python.write_text(HIDING.format(caps=shlex.join(FEW_CAPABILITIES), python=sys.executable))
    python.chmod(0o700)
    guarded.python = str(python)
    quick = {**STEPS, "hang.min_s": 3, "hang.first_step_s": 3}
    guarded.start([sys.executable, "-c", f"{OTHER_USER} # {guarded.token}"], settings=quick)
    miner = guarded.miner_pid
    inside = ["nsenter", "-m", "-t", str(guarded.guard_pid), *FEW_CAPABILITIES]
    until(lambda: len(steps(guarded)) > 100, 60, guarded.tail)
    assert subprocess.run([*inside, "test", "-e", f"/proc/{miner}"]).returncode == 1, "it is hidden"
    assert lives(miner)
    assert not [event for event in guarded.events if event["level"] in ("error", "critical")]
    assert guarded.stop() == 0
    guarded.assert_nothing_left(0.5)


def test_without_memory_files_the_miner_runs_and_the_rank_says_what_is_missing(
    guarded: Guarded,
) -> None:
    """The guard once exited with 1."""
    guarded.start(
        guarded.miner("steps", 5, 0.01, "exit0"),
        "--no-restart",
        settings={**STEPS, "miner.finite": "true"},
        preexec_fn=partial(refuse, errno.EPERM, *MEMFD_CREATE),
    )
    assert guarded.processes[0].wait(60) == 0, guarded.tail()
    assert "no shared memory for the record of rank 0" in guarded.output.read_text()
    assert steps(guarded) == []


def test_the_miners_output_is_whole_although_the_guard_is_killed(guarded: Guarded) -> None:
    code = "import time\nfor n in range(600): print('line', n, flush=True); time.sleep(0.01)"
    guarded.start([sys.executable, "-c", code], "--no-restart", settings=FAST)
    guarded.wait_for("miner_started")
    os.kill(guarded.guard_pid, signal.SIGKILL)
    assert guarded.processes[0].wait(60) == 0
    numbers = [line for line in guarded.output.read_bytes().splitlines() if line[:5] == b"line "]
    assert numbers == [b"line %d" % n for n in range(600)]


def test_an_exit_of_the_miner_while_no_guard_runs_is_reported_by_the_next(
    guarded: Guarded, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    code = f"while [ ! -e {go} ]; do sleep 0.05; done; exit 7"
    guarded.start(["sh", "-c", code], "--no-restart", settings=FAST)
    guarded.wait_for("miner_started")
    os.kill(guarded.guard_pid, signal.SIGKILL)
    go.touch()
    assert guarded.processes[0].wait(60) == 7
    assert [event["code"] for event in guarded.named("miner_exited")] == [7]


def test_a_suspended_guard_is_replaced_and_training_continues(guarded: Guarded) -> None:
    guarded.start(guarded.miner("steps", 10**6, 0.05, "finish"), settings=STEPS)
    miner = guarded.miner_pid
    os.kill(guarded.guard_pid, signal.SIGSTOP)
    killed = guarded.wait_for("guard_killed", seconds=60)
    assert "heartbeat" in killed["why"]
    assert lives(miner)
    assert guarded.stop() == 0
    guarded.assert_nothing_left(0.5)


def test_no_second_guard_gets_the_state_directory_while_one_is_replaced(guarded: Guarded) -> None:
    guarded.start(["sleep", "600"], settings=FAST)
    guarded.wait_for("miner_started")
    os.kill(guarded.guard_pid, signal.SIGKILL)
    second = guarded.start(["sleep", "600"], settings=FAST)
    assert second.wait(60) == 78
    guarded.wait_for("guard_killed")
    assert len(guarded.named("miner_started")) == 1
    guarded.processes.pop()
    assert guarded.stop() == 0


def test_a_reload_replaces_the_guard_by_the_installed_version_while_the_miner_trains(
    guarded: Guarded, tmp_path: Path
) -> None:
    package = tmp_path / "site" / "miner_guard"
    shutil.copytree(REPO / "miner_guard", package, ignore=shutil.ignore_patterns("__pycache__"))
    env = {"PYTHONPATH": str(package.parent)}
    miner = guarded.miner("steps", 10**6, 0.02, "finish")
    guarded.start(miner, settings=STEPS, env=env, cwd=tmp_path)
    pid, guard = guarded.miner_pid, guarded.guard_pid
    guarded.wait_for("inner_step", 20)
    init = package / "__init__.py"
    init.write_text(init.read_text().replace(f'"{__version__}"', '"99.0"'))
    assert "the miner keeps running" in ask(guarded.state, {"do": "reload"})["done"]
    started = guarded.wait_for("guard_started", 2)
    assert (started["version"], started["replaced"]) == ("99.0", __version__)
    assert started["guard_pid"] != guard
    count = len(steps(guarded))
    until(lambda: len(steps(guarded)) > count + 20, 30, guarded.tail)
    recorded = steps(guarded)
    assert recorded == list(range(recorded[0], recorded[0] + len(recorded))), "no step is missing"
    assert lives(pid)
    assert len(guarded.named("miner_started")) == 1
    assert not guarded.named("guard_killed")
    assert ask(guarded.state, {"do": "status"})["status"]["pid"] == pid
    assert guarded.stop() == 0
    guarded.assert_nothing_left(0.5)


@pytest.mark.parametrize("down", [False, True], ids=["the miner runs", "the miner is down"])
def test_a_pause_outlives_the_guard(guarded: Guarded, down: bool) -> None:
    """The next guard once started the miner of an operator who had paused it, also after
    `ctl reload`."""
    guarded.start(["sleep", "600"], settings=FAST)
    miner = guarded.miner_pid
    assert ask(guarded.state, {"do": "pause"})["done"]

    def kill_miner() -> None:
        os.kill(miner, signal.SIGKILL)
        guarded.wait_for("miner_exited")

    if down:
        kill_miner()
    first = guarded.guard_pid
    os.kill(first, signal.SIGKILL)
    guarded.wait_for("guard_killed")
    if not down:
        kill_miner()

    def now() -> tuple[str, bool]:
        status = status_of(guarded.state.root)
        return status["state"], status["guard_pid"] != first

    until(lambda: now() == ("paused", True), 30, guarded.tail)
    assert len(guarded.named("miner_started")) == 1
    assert ask(guarded.state, {"do": "resume"})["done"]
    guarded.wait_for("miner_started", 2)
    assert guarded.stop() == 0
    guarded.assert_nothing_left(0.5)


def test_ranks_that_their_launcher_restarts_are_counted_each_with_its_cause(
    guarded: Guarded,
) -> None:
    """torchrun's restarts in place were invisible: `restarts 0` and one incident after two."""
    crash = shlex.join(guarded.miner("steps", 5, 0.1, "crash"))
    lives_on = shlex.join(guarded.miner("steps", 10**6, 0.1, "finish"))
    causes = {
        "cuda_oom": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "disk_full": "OSError: [Errno 28] No space left on device",
    }
    lines = [f"{crash}; echo {shlex.quote(words)}" for words in causes.values()]
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    guarded.start(["sh", "-c", "; ".join([*lines, lives_on])], settings=FAST, env=launcher)
    guarded.wait_for("ranks_restarted", 2)
    assert [event["count"] for event in guarded.named("ranks_restarted")] == [1, 2]
    guarded.wait_for("incident", 2)
    assert [event["label"] for event in guarded.named("incident")] == [*causes]
    assert len(guarded.named("miner_started")) == 1
    until(lambda: status_of(guarded.state.root).get("restarts") == 2, 30, "the status")
    assert guarded.stop() == 0


ORPHANS = """
import os, sys, time
for n in range(1000):
    if os.fork() == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.wait()
print('all dead', flush=True)
time.sleep(600)
"""


def test_a_thousand_orphans_are_reaped_at_once(guarded: Guarded) -> None:
    """4,000 zombies once waited for a minute: at 100 a second, pid_max is reached in seven."""
    guarded.start([sys.executable, "-c", f"{ORPHANS} # {guarded.token}"], settings=FAST)
    until(lambda: b"all dead" in guarded.output.read_bytes(), 60, guarded.tail)
    keeper = guarded.keeper_pid

    def zombies() -> int:
        children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        return len([pid for pid in children if not lives(int(pid))])

    until(lambda: zombies() == 0, 2, lambda: f"{zombies()} zombies")
    assert guarded.stop() == 0


def test_status_names_keeper_guard_and_miner(guarded: Guarded) -> None:
    guarded.start(["sleep", "600"], settings=FAST)
    miner = guarded.miner_pid
    status = until(lambda: s if (s := status_of(guarded.state.root)).get("pid") else None, 30, "it")
    assert status["keeper_pid"] == guarded.processes[0].pid
    assert status["guard_pid"] == guarded.guard_pid
    assert status["pid"] == miner
    assert {pid for pid, _ in living(guarded.token)} >= {status["keeper_pid"], status["guard_pid"]}
    assert guarded.stop() == 0
