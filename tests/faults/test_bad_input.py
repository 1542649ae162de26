"""The guard refuses commands that it can't run, with a reason and an exit code, and changes
nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from miner_guard.state_dir import StateDir
from tests.faults.guarded import REPO, Guarded, until


def run(*words: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "miner_guard", *words],
        env={**os.environ, "PYTHONPATH": str(REPO), **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
    )
    return done.returncode, done.stderr


def test_two_guards_started_at_once_are_one(guarded: Guarded) -> None:
    guards = [guarded.start(["sleep", "600"]) for _ in range(3)]
    guarded.wait_for("miner_started")
    until(lambda: sum(g.poll() == 78 for g in guards) == 2, 60, "two of three to be refused")
    assert len(guarded.named("miner_started")) == 1
    alive = next(g for g in guards if g.poll() is None)
    alive.terminate()
    assert alive.wait(60) == 0


def test_a_second_guard_waits_for_one_that_is_stopping(guarded: Guarded, tmp_path: Path) -> None:
    file = tmp_path / "checkpoint"
    first = guarded.start(guarded.miner("graceful", 2, file), settings={"miner.stop_timeout_s": 20})
    until(lambda: b"graceful ready" in guarded.output.read_bytes(), 60, "the miner")
    first.terminate()
    second = guarded.start(["sleep", "600"], settings={"miner.stop_timeout_s": 20})
    guarded.wait_for("miner_started", 2)
    assert first.wait(60) == 0
    assert file.exists()
    assert second.poll() is None
    assert guarded.stop() == 0


def test_a_long_state_path_still_has_its_sockets(guarded: Guarded) -> None:
    guarded.state = StateDir(guarded.state.root / ("long-" * 20) / ("path-" * 20))
    guarded.start(["sleep", "600"])
    guarded.wait_for("miner_started")
    assert run("status", "--state-dir", str(guarded.state.root))[0] == 0
    assert guarded.stop() == 0
    assert not [e for e in guarded.named("guard_degraded") if "sock" in e["msg"]]
