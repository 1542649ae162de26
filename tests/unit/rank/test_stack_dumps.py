"""A rank dumps its stacks on a signal, unless the program uses that signal itself."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from miner_guard.rank import guard as hook
from miner_guard.rank.dumps import STACKS_SIGNAL
from miner_guard.state_dir import StateDir
from tests.support.ranks import Ranks


def test_a_signal_that_the_program_takes_over_later_is_no_longer_sent(
    state: StateDir, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm, among others, makes programs save and requeue on this signal, so a guard that wants
    stacks must not send it."""
    monkeypatch.setattr(hook, "_current", None)
    monkeypatch.setenv("_MINER_GUARD_WIRE", ranks.env["_MINER_GUARD_WIRE"])
    guard = hook.begin(state.root)
    guard.step(inner_step=1)
    assert state.stacks_of(0).read_bytes().startswith(b"pid ")
    before = signal.signal(STACKS_SIGNAL, lambda *_: None)
    try:
        guard.step(inner_step=2)
        guard.step(inner_step=3)
        assert state.stacks_of(0).read_bytes() == b""
        assert [what for what in ranks.messages() if "SIGUSR2" in what] == [
            "the program now uses SIGUSR2, so only py-spy can read the stacks if it hangs"
        ]
    finally:
        signal.signal(STACKS_SIGNAL, before)
        guard.close()


def test_another_faulthandler_of_the_program_keeps_its_signal(state: StateDir) -> None:
    script = (
        "import faulthandler, os, signal, sys, miner_guard\n"
        "faulthandler.register(signal.SIGUSR2, file=sys.stdout, all_threads=True)\n"
        "guard = miner_guard.init(sys.argv[1])\n"
        "def here(): os.kill(os.getpid(), signal.SIGUSR2)\n"
        "here()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(state.root)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "in here" in done.stdout
    assert not state.stacks_of(0).exists()
    assert "the program uses SIGUSR2" in done.stdout
