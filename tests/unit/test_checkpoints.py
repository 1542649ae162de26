"""Checkpoints are complete or absent; the newest complete one is resumed; a damaged one is reported
and skipped."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miner_guard.state_dir import STATE_DIR, StateDir
from tests.support import requires
from tests.support.forks import forks

requires.module("torch")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from miner_guard import checkpoints as module  # noqa: E402
from miner_guard.checkpoints import Checkpointer, CheckpointError, Saved, Skipped  # noqa: E402


@pytest.fixture(autouse=True)
def without_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STATE_DIR, raising=False)


def state(value: float) -> dict[str, Any]:
    return {"model": {"weight": torch.full((64, 64), value)}, "counters": {"total": int(value)}}


def saved(folder: Path, *steps: int, keep: int = 5) -> list[Saved]:
    done: list[Saved] = []
    writer = Checkpointer(folder, every=10, keep=keep, on_saved=done.append)
    for step in steps:
        writer.save(step, state(step))
    writer.close()
    return done


def resumed(folder: Path) -> tuple[Path | None, float, list[Skipped]]:
    target = state(-1)
    skipped: list[Skipped] = []
    path = Checkpointer(folder, every=10).resume(target, skipped.append)
    weights = target["model"]
    assert isinstance(weights, dict)
    return path, float(weights["weight"][0, 0]), skipped


def test_the_newest_is_resumed_and_the_last_k_are_kept(tmp_path: Path) -> None:
    done = saved(tmp_path, 10, 20, 30, 40, keep=2)
    assert [s.step for s in done] == [10, 20, 30, 40]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000030", "step-00000040"]
    path, weight, skipped = resumed(tmp_path)
    assert path is not None
    assert (path.name, weight, skipped) == ("step-00000040", 40.0, [])


def test_nothing_to_resume_is_an_answer(tmp_path: Path) -> None:
    assert resumed(tmp_path) == (None, -1.0, [])


def largest(path: Path) -> Path:
    return max(path.iterdir(), key=lambda p: p.stat().st_size)


HARMS: dict[str, Callable[[Path], object]] = {
    "a file is cut short": lambda path: os.truncate(largest(path), 100),
    "a file is missing": lambda path: largest(path).unlink(),
    "the index is missing": lambda path: (path / ".metadata").unlink(),
    "another model": lambda path: saved_as(path, {"something": {"else": torch.zeros(3)}}),
}


def saved_as(path: Path, content: dict[str, Any]) -> None:
    checkpoints = Checkpointer(path.parent, every=10)
    checkpoints.save(int(path.name.removeprefix("step-")), content)
    checkpoints.close()


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_checkpoint_is_skipped_with_its_reason(tmp_path: Path, harm: str) -> None:
    saved(tmp_path, 10, 20)
    HARMS[harm](tmp_path / "step-00000020")
    path, weight, skipped = resumed(tmp_path)
    assert path is not None
    assert (path.name, weight) == ("step-00000010", 10.0)
    assert [s.path.name for s in skipped] == ["step-00000020"]
    assert "cannot be loaded" in skipped[0].reason
    HARMS[harm](tmp_path / "step-00000010")
    with pytest.raises(CheckpointError, match="step-00000020 cannot be loaded"):
        resumed(tmp_path)


def test_half_written_checkpoints_are_removed_and_never_resumed(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    half = tmp_path / ".draft-00000020"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    assert resumed(tmp_path)[1] == 10.0
    assert not half.exists()


def test_where_torch_refuses_to_write_asynchronously_training_waits_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A default group with only the NCCL backend must not end training at its first checkpoint."""
    if dist.is_initialized():
        pytest.skip("another test has left a process group")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("A CPU backend must be enabled for async save")

    monkeypatch.setattr(module, "async_save", refuse)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert [s.step for s in saved(tmp_path, 10)] == [10]
        assert resumed(tmp_path)[1] == 10.0
    finally:
        dist.destroy_process_group()


def test_due_every_n_steps_and_on_request(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path, every=10)
    assert [s for s in range(1, 31) if checkpoints.due(s)] == [10, 20, 30]
    assert checkpoints.due(33, asked=True)
    checkpoints.save(33, state(33))
    assert list(module.complete_ones(tmp_path)) == [33], "it is complete: SIGTERM may follow"
    checkpoints.close()
    assert not checkpoints.due(34)
    assert resumed(tmp_path)[1] == 33.0


def test_a_full_disk_is_reported_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 10)

    def full(_source: object, _target: object) -> None:
        raise OSError(28, "No space left on device")

    checkpoints = Checkpointer(tmp_path, every=10)
    monkeypatch.setattr("miner_guard.checkpoints.os.replace", full)
    checkpoints.save(20, state(20))
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoints.wait()
    monkeypatch.undo()
    assert resumed(tmp_path)[1] == 10.0


@pytest.mark.parametrize("last", [10, 30], ids=["the same step again", "one more than is kept"])
def test_a_death_during_a_removal_leaves_no_partial_checkpoint_with_a_valid_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    checkpoints = Checkpointer(tmp_path, every=10, keep=2)
    for step in (10, 20):
        checkpoints.save(step, state(step))
        checkpoints.wait()

    def dies(path: Path, **_options: object) -> None:
        if path.exists():
            next(p for p in path.rglob("*") if p.is_file()).unlink()
            raise OSError("the process is killed here")

    monkeypatch.setattr("miner_guard.checkpoints.shutil.rmtree", dies)
    checkpoints.save(last, state(last))
    with pytest.raises(CheckpointError, match="killed here"):
        checkpoints.wait()
    monkeypatch.undo()
    named = sorted(tmp_path.glob("step-*"), reverse=True)
    assert [int(path.name.removeprefix("step-")) for path in named] == sorted({20, last})[::-1]
    for path in named:
        found, _, skipped = resumed(tmp_path)
        assert (found, skipped) == (path, [])
        shutil.rmtree(path)


@pytest.mark.parametrize(
    ("loss", "poison", "words"),
    [
        (float("nan"), 0.0, "the loss is nan on rank 0"),
        (float("inf"), 0.0, "the loss is inf on rank 0"),
        (3.0, float("nan"), "model.weight is not finite on rank 0"),
        (None, float("inf"), "model.weight is not finite on rank 0"),
    ],
)
def test_a_state_that_is_not_finite_is_never_resumed(
    tmp_path: Path, loss: float | None, poison: float, words: str
) -> None:
    """After a NaN, the next launch resumed the NaN from memory and finished with it."""
    saved(tmp_path, 10)
    checkpoints = Checkpointer(tmp_path, every=10, memory_every=1)
    bad = state(20.0)
    bad["model"]["weight"][3, 5] += poison
    assert checkpoints.save(20, bad, loss=loss) == words
    checkpoints.snapshot(20, lambda: bad, loss=loss)
    checkpoints.close()
    assert resumed(tmp_path)[:2] == (tmp_path / "step-00000010", 10.0)
    shutil.rmtree(StateDir(tmp_path).memory)


def test_an_attention_mask_is_no_reason_to_save_nothing(tmp_path: Path) -> None:
    mask = torch.triu(torch.full((4, 4), float("-inf")), 1)
    checkpoints = Checkpointer(tmp_path, every=10)
    assert checkpoints.save(10, {"mask": mask}, loss=3.0) is None
    checkpoints.close()
    assert (tmp_path / "step-00000010").is_dir()


def test_the_newer_of_memory_and_disk_is_resumed(tmp_path: Path) -> None:
    memory = StateDir(tmp_path).memory
    saved(tmp_path, 10)
    checkpoints = Checkpointer(tmp_path, every=10, memory_every=1)
    for step in (11, 12, 13):
        checkpoints.snapshot(step, lambda step=step: state(step), loss=3.0)  # type: ignore[misc]
    checkpoints.close()
    assert sorted(p.name for p in memory.iterdir()) == ["step-00000012", "step-00000013"]
    target = state(-1)
    again = Checkpointer(tmp_path, every=10, memory_every=1)
    assert again.resume(target) == memory / "step-00000013"
    assert target["counters"] == {"total": 13}
    again.save(20, state(20))
    again.close()
    assert Checkpointer(tmp_path, every=10, memory_every=1).resume(target) == (
        tmp_path / "step-00000020"
    )
    shutil.rmtree(memory)


@pytest.mark.parametrize("trouble", ["cannot be written", "is full"])
def test_training_continues_without_snapshots_where_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    reasons: list[str] = []
    if trouble == "cannot be written":
        (tmp_path / "shm").write_text("a file in the folder's place")
        monkeypatch.setattr(StateDir, "memory", tmp_path / "shm" / "snapshots")
    else:
        monkeypatch.setattr(StateDir, "memory", tmp_path / "shm")
        monkeypatch.setattr(torch, "save", full)
    checkpoints = Checkpointer(tmp_path, every=10, memory_every=1, on_memory_off=reasons.append)
    for step in (1, 2):
        checkpoints.snapshot(step, lambda: state(1))
    checkpoints.close()
    (reason,) = reasons
    assert "Not a directory" in reason or "No space left" in reason


_WRITES_FOREVER = """
import os, sys
from pathlib import Path
import torch
from miner_guard.checkpoints import Checkpointer
def work():
    checkpoints = Checkpointer(Path(sys.argv[1]), every=1, keep=3)
    for step in range(1, 100000):
        checkpoints.save(step, {"weight": torch.full((256, 1024), float(step)), "step": step})
        checkpoints.wait()
        print(step, flush=True)
"""


@pytest.mark.slow
def test_a_sigkill_at_any_moment_leaves_only_complete_checkpoints(tmp_path: Path) -> None:
    """Sends SIGKILL at several moments of the write."""
    with forks(_WRITES_FOREVER, tmp_path) as writer:
        for number in range(4):
            writer.start()
            writer.prints.readline()
            time.sleep(0.006 * number)
            writer.kill()
            target = {"weight": torch.zeros(256, 1024), "step": 0}
            path = Checkpointer(tmp_path, every=1).resume(target, lambda s: pytest.fail(s.reason))
            assert path is not None
            assert target["weight"].unique().tolist() == [target["step"]]  # type: ignore[union-attr]
            assert path.name == f"step-{target['step']:08d}"
