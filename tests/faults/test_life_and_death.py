"""How the miner's processes start and end: none escapes, none is left behind, and the guard kills
no others."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from miner_guard.record.store import RunReader
from tests.faults.guarded import Guarded, living, stat_of, until

FAST = {"miner.stop_timeout_s": 3, "restart.backoff_s": 0.1}


def wait_for_family(guarded: Guarded) -> None:
    until(lambda: b"family complete" in guarded.output.read_bytes(), 60, guarded.tail)


def test_the_next_guard_reports_one_that_was_killed_and_left_nothing(guarded: Guarded) -> None:
    """Otherwise nobody would notice a guard that the OOM killer ends every night: its miner ends
    with it, so nothing is left to report."""
    guarded.start(guarded.miner("process_tree", "stay"), settings=FAST)
    guarded.wait_for("miner_started")
    until(lambda: RunReader(guarded.state.db).now(), 30, "the status")
    killed = guarded.processes[0].pid
    guarded.stop(signal.SIGKILL)
    guarded.assert_nothing_left(15)
    for starts in (1, 2):
        guarded.start(["true"], settings={**FAST, "miner.finite": "true"})
        assert guarded.processes[-1].wait(60) == 0
        assert [event["pid"] for event in guarded.named("guard_killed")] == [killed], starts


def test_descendants_of_a_launcher_that_just_exits_are_ended_before_the_restart(
    guarded: Guarded,
) -> None:
    guarded.start(guarded.miner("process_tree", "leave"), "--max-restarts", "1", settings=FAST)
    assert guarded.processes[0].wait(60) == 75
    guarded.assert_nothing_left(0.5)
    assert len(guarded.named("orphan_killed")) == 2 * 6
    names = [e["event"] for e in guarded.events]
    assert names.index("orphan_killed") < names.index("miner_restarting")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_the_launcher_alone_is_asked_first_and_has_time_for_its_checkpoint(
    guarded: Guarded, tmp_path: Path, name: str
) -> None:
    """Psyche's run-manager leaves its container running unless it gets what Ctrl+C sends."""
    file = tmp_path / "checkpoint"
    guarded.start(guarded.miner("graceful", 1.5, file), settings={"miner.stop_signal": name})
    until(lambda: b"graceful ready" in guarded.output.read_bytes(), 60, "the miner")
    assert guarded.stop() == 0
    assert file.read_text() == f"checkpoint {name}\n"
    assert not guarded.named("orphan_killed")
    guarded.assert_nothing_left(0.5)


def test_a_frozen_rank_does_not_use_up_the_grace_of_its_launcher(guarded: Guarded) -> None:
    """torchrun waited 30 s for it, so a hang cost more than half a minute on every node."""
    code = (
        "import signal, subprocess, sys, time; rank = subprocess.Popen(['sleep', '600'])\n"
        "def end(*_): rank.terminate(); sys.exit(rank.wait())\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('rank', rank.pid, flush=True); time.sleep(600)"
    )
    settings = {"miner.stop_timeout_s": 30}
    guarded.start([sys.executable, "-c", f"{code} # {guarded.token}"], settings=settings)
    said = re.compile(rb"^rank (\d+)$", re.MULTILINE)
    found = until(lambda: said.search(guarded.output.read_bytes()), 60, guarded.tail)
    rank = int(found[1])
    os.kill(rank, signal.SIGSTOP)
    until(lambda: stat_of(rank)[0] == "T", 10, "not suspended")
    began = time.monotonic()
    assert guarded.stop() == 0
    assert time.monotonic() - began < 15
    guarded.assert_nothing_left(0.5)


def test_a_launcher_that_ignores_the_signal_dies_only_after_the_grace_period(
    guarded: Guarded,
) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', "
        "flush=True); time.sleep(600)"
    )
    guarded.start([sys.executable, "-u", "-c", f"{code} # {guarded.token}"], settings=FAST)
    until(lambda: b"up\n" in guarded.output.read_bytes(), 60, "the miner")
    guarded.processes[0].send_signal(signal.SIGINT)
    asked = time.monotonic()
    guarded.wait_for("miner_stopping")
    guarded.processes[0].send_signal(signal.SIGINT)
    guarded.wait_for("miner_stopping", 2)
    time.sleep(1.5)
    assert living(guarded.token)
    assert guarded.processes[0].wait(60) == 0
    assert 3.0 <= time.monotonic() - asked < 40.0
    guarded.assert_nothing_left(0.5)


def test_the_next_guard_ends_what_is_left_of_the_last_run(guarded: Guarded) -> None:
    guarded.start(guarded.miner("process_tree", "stay"), settings=FAST)
    wait_for_family(guarded)
    guarded.kill_everything_that_watches()
    time.sleep(0.3)
    assert _marked(guarded)
    guarded.start(["sleep", "600"], settings=FAST)
    guarded.wait_for("miner_started", 2)
    assert len(guarded.named("orphan_killed")) >= 4
    assert all("sleep" in words or "miner_guard" in words for _, words in _marked(guarded)), (
        _marked(guarded)
    )
    assert guarded.stop() == 0
    # Children that had cleared their environment can't be found once all three were killed.
    for pid, _ in living(guarded.token):
        os.kill(pid, signal.SIGKILL)


def _marked(guarded: Guarded) -> list[tuple[int, str]]:
    """The processes that carry the run's marker."""
    return living(f"_MINER_GUARD_STATE_DIR={guarded.state.root}")


def test_another_miner_on_the_same_host_is_left_alone(guarded: Guarded, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Guarded(tmp_path / "other")
    try:
        other.start(["sleep", "601"], settings=FAST)
        other.wait_for("miner_started")
        guarded.start(["sleep", "602"], settings=FAST)
        guarded.wait_for("miner_started")
        assert guarded.stop() == 0
        assert not other.named("miner_exited")
        assert other.stop() == 0
    finally:
        other.clean()
    guarded.assert_nothing_left(0.5)


def test_descriptors_do_not_leak_and_stdin_umask_and_folder_are_correct(
    guarded: Guarded, tmp_path: Path
) -> None:
    code = (
        "import os; print(sorted(int(f) for f in os.listdir('/proc/self/fd'))[:-1], "
        "os.readlink('/proc/self/fd/0'), "
        "oct(os.umask(0)), os.getcwd(), os.getsid(0) == os.getpid())"
    )
    folder = tmp_path / "work"
    folder.mkdir()
    guarded.start(
        [sys.executable, "-c", code],
        "--no-restart",
        settings=FAST,
        cwd=folder,
        preexec_fn=lambda: os.umask(0o027),
    )
    assert guarded.processes[0].wait(60) == 0
    assert f"[0, 1, 2] /dev/null 0o27 {folder} True" in guarded.tail()


def test_no_other_user_can_read_what_a_run_leaves_in_a_directory_that_was_open_to_all(
    guarded: Guarded,
) -> None:
    """Incident logs and run.db stayed readable in a directory made by `mkdir`."""
    guarded.state.root.mkdir(parents=True)
    guarded.state.root.chmod(0o755)
    settings = {**FAST, "repo.kind": "local", "repo.path": str(guarded.state.root / "repo")}
    guarded.start(
        guarded.miner("steps", 20, 0.05, "finish"),
        settings=settings,
        preexec_fn=lambda: os.umask(0),
    )
    assert guarded.processes[0].wait(60) == 0, guarded.tail()
    files = [guarded.state.root, *guarded.state.root.rglob("*")]
    shown = [p for p in files if p.name != "repo"]
    assert [str(p) for p in shown if p.stat().st_mode & 0o077] == []
    assert guarded.state.stacks_of(0) in files
    assert [e["mode"] for e in guarded.named("guard_degraded")] == ["0755"]


@pytest.mark.parametrize(("code", "words"), [(0, "[miner] finite = true"), (3, "code 3")])
def test_an_unrequested_exit_is_a_failure(guarded: Guarded, code: int, words: str) -> None:
    guarded.start(["sh", "-c", f"exit {code}"], "--max-restarts", "1", settings=FAST)
    assert guarded.processes[0].wait(60) == 75
    assert words in guarded.named("miner_exited")[0]["msg"]
    assert guarded.named("crash_loop")
    assert guarded.named("guard_stopped")[0]["reason"].startswith(
        f"crash loop: exit code {code}; 1 restart did"
    )


@pytest.mark.parametrize(
    ("end", "code", "how"),
    [
        ("exit 0", 0, "exit code 0"),
        ("exit 255", 255, "exit code 255"),
        ("kill -SEGV $$", 139, "signal SIGSEGV"),
        ("kill -40 $$", 168, "signal 40"),
    ],
)
def test_without_restarts_the_exit_code_is_the_miners(
    guarded: Guarded, end: str, code: int, how: str
) -> None:
    """As a shell reports it. A signal without a name once left the guard waiting forever."""
    guarded.start(["sh", "-c", end], "--no-restart", settings=FAST)
    assert guarded.processes[0].wait(60) == code
    reason = guarded.named("guard_stopped")[0]["reason"]
    assert reason == f"restarts are off; the miner ended: {how}"


def test_finished_only_if_the_rank_reported_it(guarded: Guarded) -> None:
    guarded.start(guarded.miner("steps", 3, 0.01, "finish"), "--finished-code", "63", settings=FAST)
    assert guarded.processes[0].wait(60) == 63
    assert guarded.named("miner_finished")
    guarded.start(guarded.miner("steps", 3, 0.01, "exit0"), "--max-restarts", "0", settings=FAST)
    assert guarded.processes[1].wait(60) == 75
    guarded.start(["true"], settings={**FAST, "miner.finite": "true"})
    assert guarded.processes[2].wait(60) == 0
    guarded.assert_nothing_left(0.5)


def test_a_stop_while_waiting_for_the_restart_cancels_it(guarded: Guarded) -> None:
    guarded.start(["false"], settings={**FAST, "restart.backoff_s": 60})
    guarded.wait_for("miner_restarting")
    asked = time.monotonic()
    assert guarded.stop() == 0
    assert time.monotonic() - asked < 30
    assert len(guarded.named("miner_started")) == 1


def test_under_nohup_the_guard_outlives_its_terminal(guarded: Guarded) -> None:
    """Otherwise a logout would stop a miner that was started with nohup."""
    guarded.start(
        guarded.miner("steps", 10000, 0.1),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    guarded.wait_for("inner_step")
    guarded.processes[-1].send_signal(signal.SIGHUP)
    guarded.wait_for("inner_step", len(guarded.named("inner_step")) + 10)
    assert not guarded.named("miner_stopping")
    assert guarded.stop() == 0


def test_a_signal_repeated_until_the_end_does_not_change_the_exit_code(guarded: Guarded) -> None:
    """pm2, or a person, may ask twice. The second signal once arrived after the guard had restored
    the default handlers."""
    guard = guarded.start(["sleep", "600"])
    guarded.wait_for("miner_started")
    deadline = time.monotonic() + 60
    while guard.poll() is None:
        assert time.monotonic() < deadline
        for number in (signal.SIGTERM, signal.SIGINT):
            guard.send_signal(number)
        time.sleep(0.002)
    assert guard.returncode == 0
    assert b"Traceback" not in guarded.output.read_bytes()
