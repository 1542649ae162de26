"""The memory tier: after a kill the next launch resumes at most one step back, never from a partial
slot."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import requires
from tests.support.forks import forks

requires.module("torch")

import torch  # noqa: E402

from miner_guard.checkpoints import Checkpointer, Skipped, memory_tier  # noqa: E402
from miner_guard.checkpoints.memory_tier import MemoryTier  # noqa: E402
from miner_guard.state_dir import STATE_DIR, StateDir  # noqa: E402


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(STATE_DIR, str(tmp_path / "state"))
    folder = StateDir(tmp_path / "state").memory
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def state(value: float, size: int = 64) -> dict[str, object]:
    return {
        "model": {"weight": torch.full((size, 64), value), "bias": torch.full((3,), value)},
        "optimizer": {"state": [{"step": torch.tensor(value), "lr": value}]},
        "counters": {"total": int(value), "name": f"at {value}"},
    }


def launch(folder: Path, off: list[str] | None = None) -> Checkpointer:
    reasons = [] if off is None else off
    return Checkpointer(folder, every=10, memory_every=1, on_memory_off=reasons.append)


def resumed(folder: Path) -> tuple[str | None, float, int, list[Skipped]]:
    target, skipped = state(-1), list[Skipped]()
    path = launch(folder).resume(target, on_skipped=skipped.append)
    model, counters = target["model"], target["counters"]
    assert isinstance(model, dict)
    assert isinstance(counters, dict)
    weight = float(model["weight"][0, 0])
    return None if path is None else str(path), weight, counters["total"], skipped


def kept(memory: Path, checkpoints: Checkpointer) -> None:
    assert checkpoints._memory is not None
    checkpoints._memory.wait()


def test_a_killed_run_resumes_from_the_last_snapshot(tmp_path: Path, memory: Path) -> None:
    first = launch(tmp_path / "disk")
    for step in range(1, 14):
        first.snapshot(step, lambda step=step: state(step))  # type: ignore[misc]
    kept(memory, first)
    assert resumed(tmp_path / "disk") == ("/dev/shm/step-00000013", 13.0, 13, [])


def test_a_newer_one_on_disk_is_preferred_and_an_older_one_is_not(
    tmp_path: Path, memory: Path
) -> None:
    first = launch(tmp_path / "disk")
    first.snapshot(12, lambda: state(12))
    kept(memory, first)
    first.save(10, state(10))
    first.wait()
    assert resumed(tmp_path / "disk")[1] == 12.0
    first.save(20, state(20))
    first.wait()
    assert resumed(tmp_path / "disk")[1] == 20.0


def test_a_requested_end_leaves_nothing_in_memory(tmp_path: Path, memory: Path) -> None:
    first = launch(tmp_path / "disk")
    first.snapshot(1, lambda: state(1))
    first.close()
    assert list(memory.iterdir()) == []
    second = launch(tmp_path / "disk")
    second.snapshot(2, lambda: state(2))

    def fails() -> None:
        try:
            raise RuntimeError("out of memory")
        finally:
            second.close()

    with pytest.raises(RuntimeError):
        fails()
    assert resumed(tmp_path / "disk")[1] == 2.0


def test_a_damaged_slot_is_replaced_by_the_previous_one(tmp_path: Path, memory: Path) -> None:
    first = launch(tmp_path / "disk")
    for step in (1, 2):
        first.snapshot(step, lambda step=step: state(step))  # type: ignore[misc]
    kept(memory, first)
    newest = max(memory.glob("*.bin"), key=lambda p: p.stat().st_mtime_ns)
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    assert resumed(tmp_path / "disk")[1] == 1.0


def test_a_model_that_has_changed_is_not_loaded_into(tmp_path: Path, memory: Path) -> None:
    first = launch(tmp_path / "disk")
    first.snapshot(3, lambda: state(3, size=8))
    kept(memory, first)
    path, weight, _, skipped = resumed(tmp_path / "disk")
    assert (path, weight) == (None, -1.0)
    assert "/model/weight has a different shape or type" in skipped[0].reason


def test_a_different_world_size_resumes_nothing(tmp_path: Path, memory: Path) -> None:
    two = MemoryTier(memory, 0, world_size=2)
    two.save(5, state(5))
    two.wait()
    assert two.whole() == {5}
    assert MemoryTier(memory, 0, world_size=4).whole() == set()


def test_without_room_training_continues_and_the_reason_is_reported(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_tier, "free_bytes", lambda _folder: 1000)
    off: list[str] = []
    first = launch(tmp_path / "disk", off)
    assert first.snapshot(1, lambda: state(1)) == 0.0
    assert first.snapshot(2, lambda: state(2)) == 0.0
    assert len(off) == 1
    assert "of memory" in off[0]
    assert list(memory.iterdir()) == []


def test_the_free_memory_is_the_lesser_of_the_tmpfs_and_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = namedtuple("space", "f_bavail f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda _folder: space(10, 4096))
    assert memory_tier.free_bytes(tmp_path) == 40960
    monkeypatch.setattr(os, "statvfs", lambda _folder: space(1 << 50, 4096))
    assert 0 < memory_tier.free_bytes(tmp_path) < 1 << 50


KILLED = """
import os, sys, torch
from pathlib import Path
from miner_guard.checkpoints import Checkpointer
def work():
    checkpoints = Checkpointer(Path(sys.argv[1]), every=1000, memory_every=1)
    for step in range(1, 10_000):
        checkpoints.snapshot(step, lambda: {"w": torch.full((200_000,), float(step)), "n": step})
        if step == 20:
            print("go", flush=True)
"""


def test_one_slot_is_complete_after_a_kill_at_any_moment(tmp_path: Path, memory: Path) -> None:
    with forks(KILLED, tmp_path / "disk") as writer:
        for wait_s in (0.0, 0.003, 0.01, 0.02):
            writer.start()
            assert writer.prints.readline() == "go\n"
            time.sleep(wait_s)
            writer.kill()
            target = {"w": torch.zeros(200_000), "n": 0}
            assert launch(tmp_path / "disk").resume(target) is not None
            weights = target["w"]
            assert isinstance(weights, torch.Tensor)
            assert isinstance(target["n"], int)
            assert target["n"] >= 19
            assert bool((weights == float(target["n"])).all()), "whole, and of one step"


TRUNCATED = """
import sys, torch
from pathlib import Path
from miner_guard.checkpoints import Checkpointer
checkpoints = Checkpointer(Path(sys.argv[1]), every=1000, memory_every=1)
for step in range(1, 60):
    checkpoints.snapshot(step, lambda: {"w": torch.full((200_000,), float(step)), "n": step})
    print(step, flush=True)
"""


def test_a_slot_that_something_truncates_does_not_kill_the_rank(
    tmp_path: Path, memory: Path
) -> None:
    """No rank can survive SIGBUS, so the slots are not mapped."""
    command = [sys.executable, "-c", TRUNCATED, str(tmp_path / "disk")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as miner:
        assert miner.stdout is not None
        for line in miner.stdout:
            for slot in memory.glob("*.bin"):
                # The rank may be about to create it again.
                with contextlib.suppress(FileNotFoundError):
                    os.truncate(slot, int(line) % 2)
    assert miner.returncode == 0
    target = {"w": torch.zeros(200_000), "n": 0}
    launch(tmp_path / "disk").resume(target)
    weights = target["w"]
    assert isinstance(weights, torch.Tensor)
    assert bool((weights == float(target["n"])).all()), "whole and of one step, or untouched"
