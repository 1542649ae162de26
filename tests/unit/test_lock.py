"""One guard per state directory, whatever happens to the lock's file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from miner_guard.guard import lock
from miner_guard.guard.lock import LockHeld, acquire
from miner_guard.state_dir import StateDir


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateDir:
    monkeypatch.setattr(lock, "WAIT_S", 0.2)
    return StateDir(tmp_path / "deep" / "state")


def test_a_second_guard_is_refused_and_the_holder_named_until_all_holders_are_gone(
    state: StateDir,
) -> None:
    guards, last_boot = acquire(state, 4711)
    keepers = os.dup(guards)
    os.close(guards)
    assert last_boot is None
    assert json.loads(state.lock.read_text())["pid"] == 4711
    with pytest.raises(LockHeld, match="the guard with pid 4711 is running there"):
        acquire(state, 1)
    os.close(keepers)
    mine, last_boot = acquire(state, 1)
    assert last_boot == json.loads(state.lock.read_text())["boot"]
    os.close(mine)


def test_a_lock_file_that_was_removed_meanwhile_is_not_taken(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise two guards could each hold a lock: one on the file, the other on the removed
    file."""
    opened = lock.open_private
    removed: list[Path] = []

    def open_and_lose(path: Path, flags: int) -> int:
        fd = opened(path, flags)
        if not removed:
            removed.append(path)
            path.unlink()
        return fd

    monkeypatch.setattr(lock, "open_private", open_and_lose)
    mine, _ = acquire(state, 2)
    assert os.fstat(mine).st_ino == state.lock.stat().st_ino
    os.close(mine)


def test_what_is_not_a_lock_file_is_refused_without_waiting_for_its_other_end(
    state: StateDir,
) -> None:
    state.root.mkdir(parents=True)
    os.mkfifo(state.lock)
    with pytest.raises(LockHeld, match="cannot write to state directory"):
        acquire(state, 1)
