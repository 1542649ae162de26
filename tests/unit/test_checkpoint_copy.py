"""Snapshots that are copied while training continues hold exactly the state of their step."""

from __future__ import annotations

import copy
import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import requires

requires.module("torch")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from miner_guard.checkpoints import Checkpointer  # noqa: E402
from miner_guard.checkpoints.host_copy import HostCopy  # noqa: E402
from miner_guard.checkpoints.layout import parts  # noqa: E402
from miner_guard.state_dir import STATE_DIR, StateDir  # noqa: E402

PATIENCE_S = 30.0


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(STATE_DIR, str(tmp_path / "state"))
    folder = StateDir(tmp_path / "state").memory
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class Model(nn.Module):
    """A model with buffers that the forward pass changes, random numbers, and a parameter whose
    memory is not contiguous, which FSDP refuses."""

    def __init__(self, *, sharded: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)
        last = torch.randn(4, 16).t()
        self.last = nn.Parameter(last.contiguous() if sharded else last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.drop(self.norm(self.first(x)))
        return hidden @ self.last


class Training:
    def __init__(self, folder: Path, *, sharded: bool = False) -> None:
        torch.manual_seed(19)
        self.model = Model(sharded=sharded)
        if sharded:
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.checkpoints = Checkpointer(
            folder, every=1000, memory_every=1, optimizers=(self.optimizer,)
        )

    def forward_backward(self) -> None:
        self.model(torch.randn(32, 8)).square().mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "random": torch.get_rng_state()}

    @property
    def copy(self) -> HostCopy:
        assert self.checkpoints._memory is not None
        return self.checkpoints._memory._copy

    def kept(self) -> set[int]:
        assert self.checkpoints._memory is not None
        self.checkpoints._memory.wait()
        return self.checkpoints._memory.whole()


def values(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: part.local.clone() for name, part in parts(state)[0].items()}


def assert_resumes(folder: Path, expected: dict[str, torch.Tensor], *, sharded: bool) -> None:
    other = Training(folder, sharded=sharded)
    other.forward_backward()
    other.step()
    state = other.state()
    assert other.checkpoints.resume(state) is not None
    found = values(state)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class Gate:
    """Holds back the copying thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        move = HostCopy._move

        def held_back(self_: HostCopy, *arguments: Any) -> None:
            assert self._open.wait(PATIENCE_S), "nothing has waited for the copy"
            move(self_, *arguments)

        monkeypatch.setattr(HostCopy, "_move", held_back)

    def open(self) -> None:
        self._open.set()

    def open_when_waited_for(self, held: HostCopy) -> None:
        """Opens the gate only once `settle` waits."""
        gate = self._open

        class Waited(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                gate.set()
                return super().wait(timeout)

        held._moved = Waited()


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_snapshot_is_the_state_of_its_step_even_if_a_forward_pass_ran_meanwhile(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, group: None, sharded: bool
) -> None:
    """The optimizer's step waits for the copy, which here starts only when that step waits."""
    training = Training(tmp_path / "disk", sharded=sharded)
    training.forward_backward()
    training.step()
    expected = copy.deepcopy(values(training.state()))
    gate = Gate(monkeypatch)
    gate.open_when_waited_for(training.copy)
    training.checkpoints.snapshot(1, training.state)
    training.forward_backward()
    meanwhile = values(training.state())
    changed = {name for name in expected if not torch.equal(meanwhile[name], expected[name])}
    assert changed == {
        "/random",
        "/model/norm.running_mean",
        "/model/norm.running_var",
        "/model/norm.num_batches_tracked",
    }
    training.step()
    assert training.copy.waited_s > 0
    assert training.kept() == {1}
    assert_resumes(tmp_path / "disk", expected, sharded=sharded)


@pytest.mark.parametrize("fused", [False, True])
def test_many_steps_each_resume_exactly(tmp_path: Path, memory: Path, fused: bool) -> None:
    training = Training(tmp_path / "disk")
    if fused:
        for parameters in training.optimizer.param_groups:
            parameters["fused"], parameters["foreach"] = True, False
    for step in range(1, 30):
        training.forward_backward()
        training.step()
        expected = values(training.state())
        training.checkpoints.snapshot(step, training.state)
    # The step after the last snapshot, which a crash interrupts.
    training.forward_backward()
    training.step()
    assert training.kept() == {28, 29}
    assert_resumes(tmp_path / "disk", expected, sharded=False)


def test_a_change_by_anything_else_costs_that_snapshot_and_the_overlap(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the snapshot would hold a state that never existed."""
    training = Training(tmp_path / "disk")
    training.forward_backward()
    training.step()
    training.checkpoints.snapshot(1, training.state)
    assert training.kept() == {1}
    gate = Gate(monkeypatch)
    training.checkpoints.snapshot(2, training.state)
    with torch.no_grad():
        training.model.first.weight.mul_(2)
    gate.open()
    with pytest.warns(RuntimeWarning, match="step 2 was discarded: /model/first.weight changed"):
        training.checkpoints.snapshot(3, training.state)
    expected = values(training.state())
    with torch.no_grad():
        training.model.first.weight.mul_(2)
    assert training.kept() == {1, 3}
    assert_resumes(tmp_path / "disk", expected, sharded=False)


def test_settle_allows_a_change_by_anything_else(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path / "disk")
    training.forward_backward()
    training.step()
    expected = values(training.state())
    Gate(monkeypatch).open_when_waited_for(training.copy)
    training.checkpoints.snapshot(1, training.state)
    training.checkpoints.settle()
    with torch.no_grad():
        training.model.first.weight.mul_(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert training.kept() == {1}
    assert_resumes(tmp_path / "disk", expected, sharded=False)


def test_an_optimizer_that_was_not_passed_waits_too_and_its_parameters_are_copied_at_once(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path / "disk")
    other = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    Gate(monkeypatch).open_when_waited_for(training.copy)

    def state() -> dict[str, Any]:
        return {"model": training.model.state_dict(), "other": other.state_dict()}

    expected = values(state())
    training.checkpoints.snapshot(1, state)
    with torch.no_grad():
        other.weight.fill_(7.0)
    other(torch.ones(3)).sum().backward()
    optimizer.step()
    assert training.copy.waited_s > 0
    assert training.kept() == {1}
    target = state()
    assert training.checkpoints.resume(target) is not None
    found = values(target)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


class Wrapper(torch.optim.Optimizer):
    """A wrapper like accelerate's: torch does not patch its step."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.optimizer is not None:
            self.optimizer.step()


def test_a_wrapped_optimizer_waits_and_without_hooks_everything_is_copied_at_once() -> None:
    """A step that calls no hook would change what is being copied."""
    parameter = nn.Parameter(torch.ones(4))
    inner = torch.optim.SGD([parameter], lr=0.1)
    assert HostCopy([Wrapper(Wrapper(inner))])._optimizers == (inner,)
    without = HostCopy([Wrapper(None)])
    assert without._optimizers == ()
    assert without._hook is None


def test_without_a_thread_for_the_copy_training_continues_without_snapshots(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path / "disk")
    training.forward_backward()
    tier = training.checkpoints._memory
    assert tier is not None

    def no_thread(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(tier._writer, "submit", no_thread)
    assert training.checkpoints.snapshot(1, training.state) == 0.0
    training.step()
    assert training.checkpoints._memory is None


def test_a_closed_checkpointer_makes_no_optimizer_wait(tmp_path: Path, memory: Path) -> None:
    from torch.optim import optimizer as optimizers

    before = len(optimizers._global_optimizer_pre_hooks)
    training = Training(tmp_path / "disk")
    assert len(optimizers._global_optimizer_pre_hooks) == before + 1
    training.checkpoints.close()
    assert len(optimizers._global_optimizer_pre_hooks) == before
