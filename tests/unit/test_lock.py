"""One guard per state directory, even if somebody removes its lock file."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from miner_guard.guard.lock import Lock, LockHeld
from miner_guard.state_dir import StateDir


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "state")


@pytest.fixture
def held(state: StateDir) -> Lock:
    lock = Lock(state, 0.0, os.getpid())
    lock.acquire()
    return lock


def test_an_existing_lock_is_left_alone(state: StateDir, held: Lock) -> None:
    before = state.lock.stat()
    assert held.keep() is None
    assert state.lock.stat() == before


def test_a_removed_lock_is_taken_back_and_keeps_a_second_guard_out(
    state: StateDir, held: Lock
) -> None:
    held.stopping(Path.write_bytes)
    state.lock.unlink()
    assert held.keep() is None
    assert json.loads(state.lock.read_text())["stopping"]
    with pytest.raises(LockHeld, match=f"the guard with pid {os.getpid()} is still stopping"):
        Lock(state, 0.0, os.getpid()).acquire()


def test_the_lock_of_a_removed_state_directory_is_taken_back_and_keeps_a_second_guard_out(
    state: StateDir, held: Lock
) -> None:
    shutil.rmtree(state.root)
    assert held.keep() is None
    with pytest.raises(LockHeld, match="is running there"):
        Lock(state, 0.0, os.getpid()).acquire()


def test_a_second_guard_that_was_quicker_is_named_once(state: StateDir, held: Lock) -> None:
    state.lock.unlink()
    with state.lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(json.dumps({"pid": 4711, "stopping": False, "stop_timeout_s": 5.0}))
        other.flush()
        warning = held.keep()
        assert warning is not None
        what = "the guard with pid 4711 now holds the lock, so two guards are running here"
        assert what in warning.fields["what"]
        assert held.keep() is None
    # The other process has exited, so the lock is this guard's again.
    assert held.keep() is None
    with pytest.raises(LockHeld):
        Lock(state, 0.0, os.getpid()).acquire()


def test_a_lock_that_cannot_be_made_again_is_reported_once(state: StateDir, held: Lock) -> None:
    state.lock.unlink()
    state.lock.mkdir()
    warning = held.keep()
    assert warning is not None
    assert "Is a directory" in warning.fields["what"]
    assert held.keep() is None
    state.lock.rmdir()
    assert held.keep() is None
    assert json.loads(state.lock.read_text())["pid"] == os.getpid()


def test_who_waits_for_a_lock_does_not_take_one_that_was_removed_meanwhile(
    state: StateDir, held: Lock
) -> None:
    """Otherwise two guards could each hold a lock: one on the file, the other on the removed
    file."""

    class Waits(Lock):
        opened = 0

        def _file(self) -> int:
            fd = super()._file()
            self.opened += 1
            if self.opened == 1:
                state.lock.unlink()
                assert held.keep() is None
            return fd

    with pytest.raises(LockHeld):
        Waits(state, 0.0, os.getpid()).acquire()
