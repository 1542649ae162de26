"""A step and its costs as the hook records them: which values are known and which are not, and that
nothing makes the GPU wait."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest

from miner_guard.rank.guard import Guard
from miner_guard.rank.layout import FLAG_LOSS_ON_CPU, JOURNAL_SIZE
from miner_guard.state_dir import StateDir
from tests.support.ranks import Ranks
from tests.unit.rank.helpers import Clock, place


@pytest.mark.parametrize("name", ["loss", "grad_norm", "eval_loss"])
def test_nan_is_distinguished_from_a_number_that_was_not_given(
    guard: Guard, ranks: Ranks, name: str
) -> None:
    guard.step()
    guard.step(**{name: math.nan})
    guard.step(**{name: math.inf})
    unknown, nan, infinite = (getattr(step, name) for step in ranks.steps())
    assert unknown is None
    assert nan is not None
    assert math.isnan(nan)
    assert infinite == math.inf


class FakeTensor:
    """The part of a tensor that the hook may touch; a test can make its value unreadable."""

    def __init__(self, device: str, value: float | None) -> None:
        self.device = type("device", (), {"type": device})()
        self._value = value

    def __float__(self) -> float:
        if self._value is None:
            raise AssertionError("this would have synchronised the GPU")
        return self._value


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda", "force a synchronisation, so it is not recorded; pass a float"),
        ("cpu", "would need a collective"),
    ],
    ids=["on a GPU", "sharded"],
)
def test_a_number_that_takes_a_wait_is_not_read_but_reported_once(
    guard: Guard, ranks: Ranks, device: str, words: str
) -> None:
    tensor = FakeTensor(device, None)
    if device == "cpu":
        tensor.to_local = None  # type: ignore[attr-defined]
    for _ in range(3):
        guard.step(loss=tensor, lr=1.0)
    assert [(s.loss, s.lr) for s in ranks.steps()] == [(None, 1.0)] * 3
    assert len(ranks.messages()) == 1
    assert words in ranks.messages()[0]


@pytest.mark.parametrize(("expect", "flagged"), [(1, True), (0, False), ("auto", False)])
def test_a_loss_on_the_cpu_is_evidence_where_cuda_is_expected(
    state: StateDir, clock: Clock, expect: object, flagged: bool, ranks: Ranks
) -> None:
    settings = json.dumps({"gpu": {"expect": expect, "of a newer version": 1}})
    guard = Guard(place(state, ranks, _MINER_GUARD_RANK_SETTINGS=settings), clock)
    guard.step(loss=FakeTensor("cpu", 1.5))
    (step,) = ranks.steps()
    assert step.loss == 1.5
    assert bool(step.flags & FLAG_LOSS_ON_CPU) == flagged


@pytest.mark.parametrize(
    "arguments", [{"inner_step": "many"}, {"lr": object()}, {"no such argument": 1}]
)
def test_invalid_values_are_reported_and_never_raise(
    guard: Guard, ranks: Ranks, arguments: dict[str, Any]
) -> None:
    guard.step(**arguments)
    guard.step(**arguments)
    guard.step(loss=1.0)
    assert len(ranks.messages()) == 1
    assert guard.error_count == 2
    assert [s.loss for s in ranks.steps()][-1] == 1.0


@pytest.mark.parametrize(
    "arguments", [{"inner_step": 1 << 63}, {"outer_step": 1e30}, {"tokens": 1 << 64}]
)
def test_a_number_too_large_for_the_record_is_unknown_and_the_step_is_recorded(
    guard: Guard, ranks: Ranks, clock: Clock, arguments: dict[str, Any]
) -> None:
    clock.now += 2
    guard.step(loss=1.5, **arguments)
    clock.now += 3
    guard.step(loss=1.4, inner_step=2)
    assert [(s.loss, s.seconds) for s in ranks.steps()] == [(1.5, 2.0), (1.4, 3.0)]
    assert "too large" in ranks.messages()[0]
    guard.close(finished=True)
    assert ranks.now().state == "finished"


@pytest.mark.filterwarnings("error")
def test_a_loss_that_still_has_its_graph_is_read_without_a_warning_from_torch(
    guard: Guard, ranks: Ranks
) -> None:
    torch = pytest.importorskip("torch")
    guard.step(loss=2 * torch.ones((), requires_grad=True))
    (step,) = ranks.steps()
    assert step.loss == 2.0
    assert ranks.messages() == []


class FakeCuda:
    """The part of `torch.cuda` that the hook may touch: bytes allocated on each GPU and their
    peak; the first GPU is current."""

    peak = 0

    def __init__(self, *allocated: int) -> None:
        self.allocated = list(allocated)

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.allocated)

    def memory_stats_as_nested_dict(self, device: int | None = None) -> dict[str, Any]:
        allocated = self.allocated[device or 0]
        return {
            "allocated_bytes": {"all": {"current": allocated, "peak": self.peak}},
            "reserved_bytes": {"all": {"current": 2 * allocated}},
        }


def test_memory_is_that_of_the_gpu_in_use_where_another_is_current(
    guard: Guard, state: StateDir, monkeypatch: pytest.MonkeyPatch, ranks: Ranks
) -> None:
    """Otherwise the model of a script that names `cuda:2` without setting the device would seem to
    be on the CPU."""
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda := FakeCuda(0, 0, 18, 3))
    guard.step()
    cuda.allocated[2] = 19
    guard.step()
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda := FakeCuda(5, 18))
    other = Guard(place(state, ranks, rank=1, world_size=2))
    other.step()
    cuda.allocated = [0, 0]
    other.step()
    assert [(s.allocated_bytes, s.reserved_bytes) for s in ranks.steps()] == [(18, 36), (19, 38)]
    assert [s.allocated_bytes for s in ranks.steps(1)] == [5, 0]


def test_memory_is_logged_with_its_peak_when_that_has_grown(
    guard: Guard, ranks: Ranks, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source 003's print_memory_stats: allocated, reserved and the peak, which decides whether OOM
    occurs."""
    gib = 1024**3
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda := FakeCuda(8 * gib))
    for step in range(40):
        cuda.peak = {0: 9, 1: 9}.get(step, 13 if step < 20 else 15) * gib
        clock.now += 10
        guard.step()
    peaks = [e["fields"]["peak_gb"] for e in ranks.entries("event")]
    assert peaks == [13.0, 15.0]
    assert {e["fields"]["reserved_gb"] for e in ranks.entries("event")} == {16.0}


def test_costs_are_summed_up_and_leave_room_for_decisions(
    guard: Guard, ranks: Ranks, clock: Clock
) -> None:
    for _ in range(20_000):
        guard.add_cost("eval", 0.5)
        clock.now += 11
    with guard.track("plot"):
        clock.now += 2
    guard.close()
    first = ranks.entries("cost")
    reader = ranks.reader()
    assert JOURNAL_SIZE // 4 < guard._recorder.room() < JOURNAL_SIZE // 2
    *_, (reader.bytes_read, _) = reader.entries(0)
    guard._costs.flush()
    second = ranks.entries("cost")
    assert sum(e["seconds"] for e in (*first, *second) if e["operation"] == "eval") == 10_000.0
    assert [e["seconds"] for e in second if e["operation"] == "plot"] == [2.0]
