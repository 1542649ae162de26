"""The usual step of an unmodified loop."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from miner_guard.attach.adapter import Adapter
from miner_guard.rank.guard import Guard
from miner_guard.rank.layout import StepRecord
from miner_guard.state_dir import StateDir
from tests.support import requires
from tests.support.hooked import hooked
from tests.support.ranks import Ranks
from tests.unit.rank.helpers import place


class Loop:
    """A training loop in this process, with the hook attached."""

    def __init__(self, ranks: Ranks, guard: Guard) -> None:
        import torch

        self.torch: Any = torch
        self.guard, self.ranks = guard, ranks
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25)
        self.losses: list[float] = []

    def loss(self, by: int = 1) -> Any:
        return self.model(self.torch.randn(4, 2)).square().mean() / by

    def steps(self, count: int) -> None:
        for _ in range(count):
            loss = self.loss()
            loss.backward()
            self.losses.append(loss.item())
            self.optimizer.step()

    def recorded(self) -> list[StepRecord]:
        return self.ranks.steps()

    def check(self) -> None:
        """Check that every step is recorded once, with its own loss, and that nothing is
        degraded."""
        records = self.recorded()
        assert [r.inner_step for r in records] == list(range(1, len(self.losses) + 1))
        assert [r.loss for r in records] == pytest.approx(self.losses, rel=1e-6)
        assert {"backward", "optimizer"} <= set(records[-1].phases)
        assert self.guard._stepper.phases.stack == []
        assert self.ranks.messages() == []


@pytest.fixture
def loop(state: StateDir, ranks: Ranks) -> Iterator[Loop]:
    requires.module("torch")
    guard, adapter = Guard(place(state, ranks)), Adapter("auto")
    setattr(adapter, "begin", lambda agree: setattr(adapter, "guard", guard))  # noqa: B010
    with hooked(adapter) as auto:
        auto._diagnosed = True
        yield Loop(ranks, guard)


def test_a_step_that_raises_leaves_no_phase_open(loop: Loop) -> None:
    def fails() -> None:
        raise RuntimeError("no step")

    loop.steps(6)
    failed = loop.loss(by=2)
    failed.backward()
    with pytest.raises(RuntimeError, match="no step"):
        loop.optimizer.step(fails)
    rest = loop.loss(by=2)
    rest.backward()
    loop.optimizer.step()
    loop.losses.append(failed.item() + rest.item())
    loop.steps(3)
    loop.check()


def test_an_optimizer_that_calls_its_parents_step_takes_one_step(loop: Loop) -> None:
    """torch runs the hooks for the subclass and for its parent; the step must not count twice."""

    class Subclass(loop.torch.optim.SGD):  # type: ignore[misc, name-defined]
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    loop.optimizer = Subclass(loop.model.parameters(), lr=0.25)
    loop.steps(8)
    loop.check()


def test_an_error_in_backward_reaches_the_program(loop: Loop) -> None:
    loop.steps(6)
    loss = loop.torch.tensor(1.0)
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()
    assert loop.guard._stepper.phases.stack == []


@pytest.mark.parametrize("odd", ["double", "bfloat16", "vector", "tensor_lr", "closure"])
def test_unusual_steps_are_recorded_too(loop: Loop, odd: str) -> None:
    loop.steps(6)
    loss = loop.loss()
    if odd == "vector":
        loss.unsqueeze(0).backward()
    elif odd == "tensor_lr":
        loop.optimizer.param_groups[0]["lr"] = loop.torch.tensor(0.25)
        loss.backward()
    elif odd == "closure":
        loop.optimizer.step(lambda: loss.backward())
    else:
        loss = loss.to(getattr(loop.torch, odd))
        loss.backward()
    if odd != "closure":
        loop.optimizer.step()
    records = loop.recorded()
    assert [r.inner_step for r in records] == [1, 2, 3, 4, 5, 6, 7]
    assert records[-1].loss == (None if odd == "vector" else pytest.approx(loss.item()))
    assert records[-1].lr == 0.25


def test_a_program_continues_without_its_guard(loop: Loop) -> None:
    loop.steps(6)
    loop.guard.close()
    loop.steps(2)
    assert len(loop.recorded()) == 6


@pytest.mark.parametrize("way", ["pipeline", "checkpoint"])
def test_the_loss_is_known_however_the_engine_is_entered(loop: Loop, way: str) -> None:
    """Only `Tensor.backward` was followed: the loss of a pipeline's last stage was unknown."""
    engine = loop.torch.autograd.backward
    for _ in range(6):
        loss = loop.loss()
        if way == "pipeline":
            engine([loss, loss / 8], grad_tensors=[None, loop.torch.tensor(0.5)])
        else:
            batch = loop.torch.randn(4, 2, requires_grad=True)
            again = loop.torch.utils.checkpoint.checkpoint
            part = again(lambda x: loop.model(x).square().mean(), batch, use_reentrant=True)
            loss = part + loss
            loss.backward()
            assert batch.grad is not None, "the engine was entered again, inside it"
        loop.losses.append(loss.item())
        loop.optimizer.step()
    loop.check()


def test_the_replacement_of_backward_looks_like_it(loop: Loop) -> None:
    replaced = loop.torch.autograd.backward
    assert replaced.__name__ == "backward"
    assert "graph" in replaced.__doc__
    assert list(inspect.signature(replaced).parameters)[:2] == ["tensors", "grad_tensors"]
    loss = loop.loss()
    loss.backward(retain_graph=True)
    loss.backward(inputs=list(loop.model.parameters()))
    assert loop.model.weight.grad is not None
