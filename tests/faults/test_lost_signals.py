"""The guard needs no signal to notice a change, and loses none that arrives, whatever its parent
blocked or closed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.guarded import Guarded, until

FAST = {"miner.stop_timeout_s": 3, "restart.backoff_s": 0.1}
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"


def block_all() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def start(guarded: Guarded, *flags: str, code: str = SLEEPER, **popen: object) -> None:
    guarded.start(
        [sys.executable, "-u", "-c", f"{code} # {guarded.token}"], *flags, settings=FAST, **popen
    )


def test_a_dead_miner_is_noticed_although_the_parent_blocked_every_signal(guarded: Guarded) -> None:
    """A dead miner once stayed `running`: the guard inherited the signal mask, and SIGCHLD never
    came."""
    start(guarded, "--max-restarts", "1", code="raise SystemExit(7)", preexec_fn=block_all)
    assert guarded.processes[0].wait(60) == 75
    assert [event["code"] for event in guarded.named("miner_exited")] == [7, 7]


def test_a_dead_miner_is_noticed_although_the_parent_ignores_its_children(guarded: Guarded) -> None:
    """The kernel then reaped the miner itself, and the guard read 0 as its exit code."""
    start(
        guarded,
        "--no-restart",
        code="raise SystemExit(7)",
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )
    assert guarded.processes[0].wait(60) == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT, signal.SIGXCPU])
def test_a_stop_is_honoured_although_the_parent_blocked_every_signal(
    guarded: Guarded, number: signal.Signals
) -> None:
    start(guarded, preexec_fn=block_all)
    until(lambda: b"up" in guarded.output.read_bytes(), 60, guarded.tail)
    assert guarded.stop(number, 30) == 0
    assert number.name in guarded.named("guard_stopped")[0]["reason"]


def test_a_guard_without_standard_streams_runs_and_logs_to_its_file(guarded: Guarded) -> None:
    """Otherwise the guard would end with a traceback, or open the lock file as descriptor 1."""

    def close_all() -> None:
        for fd in (0, 1, 2):
            os.close(fd)

    start(guarded, preexec_fn=close_all)
    guarded.wait_for("miner_started")
    assert b"\0" not in guarded.state.lock.read_bytes()
    assert guarded.state.lock.read_text().startswith("{")
    assert guarded.stop() == 0
    assert guarded.named("guard_stopped")


def test_a_guard_in_the_background_of_a_terminal_that_stops_writers_runs(guarded: Guarded) -> None:
    """With `stty tostop`, SIGTTOU stopped the guard at its first line, and the miner's output with
    it."""
    script = Path(__file__).with_name("miners") / "background.py"
    settings = {
        f"MINER_GUARD_{key.upper().replace('.', '__')}": str(value) for key, value in FAST.items()
    }
    line = [
        *(sys.executable, "-m", "miner_guard", "run", "--state-dir", str(guarded.state.root), "--"),
        *(sys.executable, "-u", "-c", f"{SLEEPER} # {guarded.token}"),
    ]
    env = {**os.environ, "MINER_GUARD_GPU__PREFLIGHT": "false", **settings}
    terminal = subprocess.Popen(
        [sys.executable, str(script), *line], env=env, stdin=subprocess.DEVNULL
    )
    guarded.processes.append(terminal)
    started = guarded.wait_for("guard_started")
    guarded.wait_for("miner_started")
    os.kill(started["pid"], signal.SIGTERM)
    guarded.wait_for("guard_stopped")
    assert terminal.wait(60) == 0


def test_a_stop_of_a_guard_whose_loop_hangs_ends_the_miner_and_leaves_the_stacks(
    guarded: Guarded,
) -> None:
    """A wedged guard must not stay in the state `ending` forever, ignore SIGTERM and keep the miner
    alive."""
    wedge = Path(__file__).with_name("miners") / "wedged_guard.py"
    guarded.entry = str(wedge)
    start(guarded)
    until(lambda: b"wedged now" in guarded.output.read_bytes(), 60, guarded.tail)
    time.sleep(0.5)
    asked = time.monotonic()
    assert guarded.stop(signal.SIGTERM, 60) == 1
    assert time.monotonic() - asked < 30
    guarded.assert_nothing_left()
    printed = guarded.output.read_text()
    assert "the supervisor's loop is hung; stacks of all threads" in printed
    assert "hang_here" in printed
