"""The loss of a step under `--attach auto`: the number that the trainer logs, read without waiting
for a GPU."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from miner_guard.attach.updates import Leader
from miner_guard.rank.losses import Losses
from miner_guard.rank.steps import Loss
from tests.support import requires


class Tensor:
    """A torch scalar. One on the GPU must not be asked for its value, because that would wait for
    the GPU."""

    requires_grad = False

    grad_fn = None

    def __init__(self, value: float, kind: str = "cpu") -> None:
        self.value = float(value)
        self.device = SimpleNamespace(type=kind)

    def dim(self) -> int:
        return 0

    def detach(self) -> Tensor:
        return self

    def item(self) -> float:
        assert self.device.type == "cpu", "a synchronisation"
        return self.value

    __float__ = item


class Gpu:
    """A GPU that has completed copies up to number `done`. Waiting for one fails, because its event
    has no method for that."""

    def __init__(self) -> None:
        self.started = self.done = 0
        self.captures = False

    def capturing(self) -> bool:
        return self.captures

    def copy(self, value: Any) -> tuple[Any, Any]:
        assert not self.captures, "the copy would become part of the CUDA graph"
        self.started += 1
        return Tensor(value.value), SimpleNamespace(query=partial(self._has_done, self.started))

    def _has_done(self, number: int) -> bool:
        assert not self.captures, "a query breaks the capture of a CUDA graph"
        return number <= self.done


def weights() -> Any:
    """A loss of 1 of torch's own, with its graph."""
    requires.module("torch")
    import torch

    return torch.ones((), requires_grad=True) * 1.0


def step(losses: Losses, number: int, *tensors: Any, whole: bool = False) -> Loss | None:
    """A step that consumed these losses."""
    reads = [losses.read(tensor, whole=whole) for tensor in tensors]
    return losses.take(number, [read for read in reads if read is not None])


def test_micro_batches_divided_by_their_number_add_up_to_their_mean() -> None:
    losses = Losses()
    shares = (weights() / 4, weights() * 0.25, 0.25 * weights(), weights())
    assert step(losses, 1, *shares) == Loss(pytest.approx(1.75), 0, summed=True)
    quarters = [weights() * value / 4 for value in (2.0, 4.0, 3.0, 7.0)]
    assert step(losses, 2, *quarters) == Loss(4.0)
    assert losses.micro_batches == 4


@pytest.mark.parametrize("factor", [math.nan, math.inf, 0.0])
def test_a_factor_that_is_no_number_of_micro_batches_is_part_of_the_loss(factor: float) -> None:
    losses = Losses()
    step(losses, 1, weights() * factor, weights() / factor if factor else weights())
    assert losses.micro_batches is None


def test_losses_that_nothing_divides_say_that_they_are_a_sum() -> None:
    """`Loss:` must not show four times the number that the trainer prints without explaining
    why."""
    losses = Losses()
    assert step(losses, 1, Tensor(0.7), Tensor(0.6)) == Loss(pytest.approx(1.3), 0, summed=True)
    assert losses.micro_batches is None
    assert step(losses, 2, Tensor(0.5)) == Loss(0.5)


def test_what_a_framework_adds_up_itself_is_its_loss() -> None:
    parts = map(Tensor, (1.1, 1.2, 1.3))
    assert step(Losses(), 1, *parts, whole=True) == Loss(pytest.approx(3.6))


def test_a_scaled_loss_is_read_before_its_scale() -> None:
    """A loss of 2.30 must not be printed as `Loss: 150956`: that is 65536 times as much, and it
    halves when the scale does."""
    losses, reads = Losses(), []
    raw = weights() * 2.3 / 2
    for _ in range(2):
        result = raw * 65536
        losses.scaled(raw, result)
        reads.append(losses.read(result))
    assert losses.take(1, [each for each in reads if each]) == Loss(pytest.approx(2.3))
    assert losses.micro_batches == 2


def test_a_loss_on_a_gpu_comes_when_it_is_there_and_names_its_step() -> None:
    gpu = Gpu()
    losses = Losses(gpu)
    answers = []
    for number in range(1, 6):
        answers.append(step(losses, number, Tensor(float(number), "cuda")))
        gpu.done = max(0, number - 1)
    assert answers == [None, None, Loss(1.0, 2), Loss(2.0, 2), Loss(3.0, 2)]


def test_of_several_that_arrive_together_the_one_that_is_not_a_number_counts() -> None:
    gpu = Gpu()
    losses = Losses(gpu)
    for number, value in enumerate((1.0, math.nan, 3.0), 1):
        assert step(losses, number, Tensor(value, "cuda")) is None
    gpu.done = 3
    loss = losses.take(4, [])
    assert loss is not None
    assert math.isnan(loss.value)
    assert loss.steps_ago == 2


def test_a_gpu_that_falls_far_behind_costs_neither_memory_nor_waiting() -> None:
    gpu = Gpu()
    losses = Losses(gpu)
    for number in range(1, 2001):
        assert step(losses, number, *(Tensor(0.25, "cuda") for _ in range(8))) is None
    gpu.done = gpu.started
    loss = losses.take(2001, [])
    assert loss is not None
    assert loss.value == 2.0
    for number in range(2002, 2010):
        step(losses, number, Tensor(float(number), "cuda"))
        gpu.done = gpu.started
    assert losses.take(2010, []) == Loss(2009.0, 1), "it catches up"


def test_nothing_is_copied_or_queried_while_a_cuda_graph_is_captured() -> None:
    gpu = Gpu()
    losses = Losses(gpu)
    step(losses, 1, Tensor(1.0, "cuda"))
    gpu.captures = True
    assert step(losses, 2, Tensor(2.0, "cuda")) is None
    gpu.captures, gpu.done = False, 1
    assert losses.take(3, []) == Loss(1.0, 2)


def test_a_loss_that_can_not_be_read_is_unknown_with_all_that_belongs_to_it() -> None:
    losses = Losses(Gpu())
    assert step(losses, 1, Tensor(1.0), Tensor(1.0, "mps")) is None
    assert losses.take(2, []) is None, "no backward, no loss"


class Optimizer:
    """An optimizer that can step."""


@pytest.mark.parametrize(
    ("order", "counted", "cyclic"),
    [
        ("aaaa", "aaaa", False),
        ("dgdgdgdg", "dggg", True),
        ("mamama", "maa", True),
        ("iiiioiiiio", "iiiiiiii", False),
        ("ccccgccccg", "cccccccc", False),
        ("cgccccgccccg", "cccccccc", False),
        ("aaaabbbb", "aaaabbb", False),
    ],
)
def test_one_of_several_optimizers_counts_the_steps(order: str, counted: str, cyclic: bool) -> None:
    """A plain loop, a GAN, Muon beside Adam, DiLoCo's inner and outer optimizer, a critic with its
    generator, layers that train one after the other."""
    leader, optimizers = Leader(), {name: Optimizer() for name in order}
    assert "".join(name for name in order if leader.leads(optimizers[name])) == counted
    assert leader.cyclic == cyclic
