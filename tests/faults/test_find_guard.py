"""`status`, `logs` and other commands without a flag use the guard that is running."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from miner_guard import __version__
from miner_guard.cli import options as find
from miner_guard.cli.main import run
from miner_guard.record import status_document
from miner_guard.state_dir import StateDir
from tests.faults.guarded import Guarded, until
from tests.support.present_state import write_status

FAST = {"miner.stop_timeout_s": 3, "gpu.preflight": "false"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state home of a user who has no guard with the default name; the guards of other tests
    are hidden from it."""
    monkeypatch.delenv("MINER_GUARD_STATE_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(psutil, "process_iter", lambda _: iter(()))
    return tmp_path / "home" / "miner-guard"


def ended(root: Path, age_s: float) -> StateDir:
    """The state that a guard leaves behind."""
    state = StateDir(root)
    root.mkdir(parents=True)
    write_status(state.root, {"state": "ended"}, age_s=60.0)
    then = time.time() - age_s
    os.utime(state.db, (then, then))
    return state


def test_the_running_guard_is_found_anywhere(
    guarded: Guarded,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    guarded.start(["sleep", "600"], settings=FAST)
    guarded.wait_for("miner_started")
    until(guarded.state.db.exists, 60, "run.db")
    guard = psutil.Process(guarded.guard_pid)
    guard.info = {"cmdline": guard.cmdline()}
    monkeypatch.setattr(psutil, "process_iter", lambda _: iter([guard]))
    for words in (["status"], ["logs", "--event", "miner_started"], ["top", "--once"]):
        assert run(words) == 0
        assert f"--state-dir {guarded.state.root}" in capsys.readouterr().err
    assert run(["status", "--check"]) == 0
    assert capsys.readouterr().out == "progressing\n"
    assert run(["ctl", "pause"]) == 0
    os.kill(guarded.named("miner_started")[0]["pid"], signal.SIGKILL)
    until(lambda: run(["status", "--check"]) == 1, 60, "a miner that stays down to be unhealthy")
    words = capsys.readouterr().err
    assert any(f"miner-guard: {life}" in words for life in ("STARTING", "RESTARTING", "STOPPED"))
    assert run(["status", "--name", "another"]) == 3, "what is named is what is meant"
    assert guarded.stop() == 0


def test_several_guards_are_listed_worst_first_and_none_is_chosen(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two = [StateDir(home / "sn38"), StateDir(tmp_path / "elsewhere")]
    for state, colour in zip(two, ("green", "red"), strict=True):
        state.root.mkdir(parents=True, mode=0o700)
        write_status(state.root, {"verdict": {"life": "training", "colour": colour, "cause": "x"}})
    monkeypatch.setattr(status_document, "running_guards", lambda: two)
    assert run(["status"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"--state-dir {tmp_path}/elsewhere  TRAINING")
    assert second.startswith("--name sn38  TRAINING")
    assert run(["top", "--once"]) == 64
    words = capsys.readouterr().err
    assert (
        f"2 guards are running here; name one: --name sn38 · --state-dir {tmp_path}/elsewhere"
        in words
    )


def test_after_the_demo_its_state_is_shown(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise `status` and `report` would not show the numbers of `make demo`."""
    ended(home / "sn38", 500.0)
    demo = ended(tmp_path / "work" / ".demo" / "state", 5.0)
    assert find.find_guard(None, None).root == demo.root
    assert (
        f"no guard is running; using the last one: --state-dir {demo.root}"
        in capsys.readouterr().err
    )
    assert run(["status"]) == 3
    assert capsys.readouterr().out.startswith("GUARD GONE: the guard was killed")


def test_the_default_guard_takes_precedence_over_one_that_ended_elsewhere(home: Path) -> None:
    usual = ended(home / "miner", 500.0)
    ended(home / "sn38", 5.0)
    assert find.find_guard(None, None).root == usual.root


def test_the_environment_variable_decides(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(home / "sn38", 5.0)
    monkeypatch.setenv("MINER_GUARD_STATE_DIR", str(tmp_path / "mine"))
    assert find.find_guard(None, None).root == tmp_path / "mine"


def test_a_command_of_a_new_version_says_that_the_guard_runs_the_old_one(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise an operator would believe that an update is active before any guard runs it."""
    guarded.start(["sleep", "600"], settings=FAST)
    guarded.wait_for("miner_started")
    here = ["--state-dir", str(guarded.state.root)]
    assert run(["ctl", "pause", *here]) == 0
    assert "version" not in capsys.readouterr().err
    monkeypatch.setattr(find, "__version__", "99.0")
    words = (
        f"the running guard is version {__version__}, but this command is version 99.0; run "
        "`miner-guard ctl reload`"
    )
    for command in (["ctl", "pause"], ["status"], ["status", "--json"]):
        assert run([*command, *here]) == 0
        assert words in capsys.readouterr().err
    assert guarded.stop() == 0
