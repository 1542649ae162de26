"""Checkpoints are complete or absent; the newest complete one is resumed; a damaged one is reported
and skipped."""

from __future__ import annotations

import json
import os
import shutil
import time
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
from miner_guard.checkpoints import MANIFEST, Checkpointer, CheckpointError, Saved, Skipped, damage  # noqa: E402


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


def resumed(folder: Path, which: str = "latest") -> tuple[Path | None, float, list[Skipped]]:
    target = state(-1)
    skipped: list[Skipped] = []
    path = Checkpointer(folder, every=10).resume(target, which, skipped.append)
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


def test_a_named_checkpoint_is_resumed(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    assert resumed(tmp_path, "step-00000010")[1] == 10.0
    with pytest.raises(CheckpointError, match="its manifest cannot be read"):
        resumed(tmp_path, "step-00000099")


def test_nothing_to_resume_is_an_answer(tmp_path: Path) -> None:
    assert resumed(tmp_path) == (None, -1.0, [])


def largest(path: Path) -> Path:
    return max((p for p in path.iterdir() if p.name != MANIFEST), key=lambda p: p.stat().st_size)


def cut(path: Path) -> None:
    os.truncate(largest(path), 100)


def flip(path: Path) -> None:
    data = bytearray(largest(path).read_bytes())
    data[len(data) // 2] ^= 1
    largest(path).write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (cut, "has 100 bytes"),
        (flip, "does not match its checksum"),
        (lambda p: largest(p).unlink(), "is missing"),
        (lambda p: (p / MANIFEST).unlink(), "unfinished"),
        (lambda p: (p / MANIFEST).write_text('{"files"'), "its manifest cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_its_reason(
    tmp_path: Path, harm: object, words: str
) -> None:
    saved(tmp_path, 10, 20)
    assert callable(harm)
    harm(tmp_path / "step-00000020")
    path, weight, skipped = resumed(tmp_path)
    assert path is not None
    assert (path.name, weight) == ("step-00000010", 10.0)
    assert [s.path.name for s in skipped] == ["step-00000020"]
    assert words in skipped[0].reason


def test_a_checkpoint_whose_content_does_not_match_is_skipped_too(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    checkpoints = Checkpointer(tmp_path, every=10)
    checkpoints.save(20, {"something": {"else": torch.zeros(3)}})
    checkpoints.close()
    path, weight, skipped = resumed(tmp_path)
    assert path is not None
    assert (path.name, weight) == ("step-00000010", 10.0)
    assert "cannot be loaded" in skipped[0].reason


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
    checkpoints.close()
    assert not checkpoints.due(34)
    assert damage(tmp_path / "step-00000033") is None


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
    named = sorted(tmp_path.glob("step-*"))
    assert [int(path.name.removeprefix("step-")) for path in named] == sorted({20, last})
    assert [damage(path) for path in named] == [None, None]


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
    assert damage(tmp_path / "step-00000010") is None


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


def test_training_begins_without_snapshots_where_the_memory_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    (tmp_path / "shm").write_text("a file in the folder's place")
    monkeypatch.setattr(StateDir, "memory", tmp_path / "shm" / "snapshots")
    checkpoints = Checkpointer(tmp_path, every=10, memory_every=1, on_memory_off=reasons.append)
    checkpoints.snapshot(1, lambda: state(1))
    checkpoints.close()
    assert len(reasons) == 1
    assert "Not a directory" in reasons[0]


def test_training_continues_without_snapshots_when_the_memory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    checkpoints = Checkpointer(tmp_path, every=10, memory_every=1, on_memory_off=reasons.append)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    checkpoints.snapshot(1, lambda: state(1))
    checkpoints.snapshot(2, lambda: state(2))
    assert len(reasons) == 1
    assert "No space left" in reasons[0]
    shutil.rmtree(StateDir(tmp_path).memory)


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
            complete = sorted(tmp_path.glob("step-*"))
            assert complete
            assert [damage(p) for p in complete] == [None] * len(complete)
            manifest = json.loads((complete[-1] / MANIFEST).read_text())
            assert manifest["step"] == int(complete[-1].name.removeprefix("step-"))
