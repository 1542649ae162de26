"""Phases of a step: their durations, nested, across steps, in other threads, and when an exception
passes through."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from miner_guard import costs as global_tracker
from miner_guard.costs import MonitoringCostTracker, get_global_tracker
from miner_guard.rank import guard as hook
from miner_guard.rank.guard import Guard
from miner_guard.rank.layout import FLAG_EVAL, FLAG_FIRST, FLAG_SYNC
from tests.support.ranks import Ranks
from tests.unit.rank.helpers import Clock


def test_phases_are_inclusive_and_a_nested_one_is_not_counted_twice(
    guard: Guard, ranks: Ranks, clock: Clock
) -> None:
    with guard.phase("checkpoint"):
        clock.now += 90
    guard.step()
    with guard.phase("forward"):
        clock.now += 1
        with guard.phase("data"):
            clock.now += 2
        with guard.phase("forward"):
            clock.now += 4
    guard.step(outer_step=1, inner_step=7, loss=2.5, lr=1e-4, grad_norm=0.5, tokens=512)
    first, step = ranks.steps()
    assert first.phases == {"pause": 90.0}
    assert first.flags == FLAG_FIRST | FLAG_SYNC
    assert step.phases == {"forward": 7.0, "data": 2.0}
    assert (step.inner_step, step.loss, step.lr, step.grad_norm, step.tokens) == (
        7,
        2.5,
        1e-4,
        0.5,
        512,
    )
    assert step.seconds == 7.0


def test_monitor_knows_what_is_nested_in_it(guard: Guard, ranks: Ranks, clock: Clock) -> None:
    with guard.phase("monitor"):
        clock.now += 1
        with guard.phase("val_loss"):
            clock.now += 2
            with guard.phase("inference"):
                clock.now += 3
        with guard.phase("my own thing"):
            clock.now += 4
    guard.step()
    (step,) = ranks.steps()
    assert step.phases == {"monitor": 10.0, "val_loss": 5.0, "inference": 3.0, "other": 4.0}
    assert step.nested_in_monitor_s == 9.0
    assert step.flags & FLAG_EVAL
    assert not step.flags & FLAG_SYNC


def test_a_phase_that_spans_two_steps_is_shared_between_them(
    guard: Guard, ranks: Ranks, clock: Clock
) -> None:
    with guard.phase("upload"):
        clock.now += 5
        guard.step(inner_step=1)
        now = ranks.now()
        assert (now.phase, now.phase_since) == ("upload", 1000.0)
        clock.now += 3
    guard.step(inner_step=2)
    assert [s.phases["upload"] for s in ranks.steps()] == [5.0, 3.0]


def test_the_header_shows_the_innermost_phase_and_its_allowance(
    guard: Guard, ranks: Ranks, clock: Clock
) -> None:
    def phase() -> tuple[str, float, float | None]:
        now = ranks.now()
        return now.phase, now.phase_since, now.allowance_s

    with guard.phase("load_state", allowance_s=77.0):
        clock.now += 1
        with guard.phase("download"):
            assert phase() == ("download", 1001.0, 76.0), "what is left of the one around it"
            clock.now += 1
        assert phase() == ("load_state", 1000.0, 77.0)
    assert phase() == ("", 1002.0, None)
    with guard.phase("val_loss"):
        assert phase() == ("val_loss", 1002.0, None), "the settings know it"
        clock.now += 10
        with guard.phase("data"):
            assert phase() == ("data", 1012.0, 1790.0)


def test_phases_of_a_background_thread_take_no_time_of_the_step(
    guard: Guard, ranks: Ranks, clock: Clock
) -> None:
    def upload() -> None:
        with guard.phase("upload"):
            clock.now += 9

    thread = threading.Thread(target=upload)
    thread.start()
    thread.join()
    guard.step()
    (step,) = ranks.steps()
    assert step.phases == {}


def test_an_exception_passes_through_a_phase_and_leaves_no_phase_open(
    guard: Guard, ranks: Ranks
) -> None:
    def fails() -> None:
        with guard.phase("forward"):
            guard.phase("data").__enter__()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    now = ranks.now()
    assert now.phase == ""


def test_a_phase_inside_a_compiled_model_breaks_no_graph(guard: Guard, ranks: Ranks) -> None:
    """Reading a clock breaks the graph, and fails under `fullgraph`."""
    torch = pytest.importorskip("torch")

    def forward(x: Any) -> Any:
        with guard.phase("forward"):
            y = x * 2
        return y.sum()

    model = torch.compile(forward, backend="eager", fullgraph=True)
    assert float(model(torch.ones(3))) == 6.0
    with guard.phase("data"):
        pass
    guard.step(loss=6.0)
    (step,) = ranks.steps()
    assert set(step.phases) <= {"data"}
    assert ranks.messages() == []


@pytest.mark.filterwarnings("error:Dynamo does not know")
def test_a_step_inside_a_compiled_function_is_recorded_and_not_compiled(
    guard: Guard, ranks: Ranks
) -> None:
    torch = pytest.importorskip("torch")

    def train(x: Any) -> Any:
        loss = (x * 2).sum()
        guard.step(loss=loss)
        return loss

    with torch._dynamo.config.patch(error_on_recompile=True):
        guard.step(loss=6.0)
        compiled = torch.compile(train, backend="eager")
        for _ in range(4):
            compiled(torch.ones(3))
    assert [s.loss for s in ranks.steps()] == [6.0] * 5
    assert ranks.messages() == []


@pytest.mark.parametrize("way", ["guard", "global", "own"])
def test_the_open_monitoring_operation_is_shown(
    ranks: Ranks, guard: Guard, clock: Clock, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Source 000's incident: the guard must not take an evaluation of minutes for a hang."""
    monkeypatch.setattr(hook, "_current", guard)
    monkeypatch.setattr(global_tracker, "_global", None)
    tracker = get_global_tracker({}) if way == "global" else MonitoringCostTracker()
    track = guard.track if way == "guard" else tracker.track

    def operation() -> tuple[str, float | None]:
        now = ranks.now()
        return now.operation, now.operation_since

    guard.step(inner_step=1)
    assert operation() == ("", None)
    clock.now += 1
    with track("evolution_snapshot"):
        since = clock.now
        clock.now += 240
        with track("inner"):
            assert operation() == ("evolution_snapshot", since)
        assert operation() == ("evolution_snapshot", since)
    assert operation() == ("", None)
    with pytest.raises(ValueError, match="fails"), track("failing"):
        raise ValueError("fails")
    assert operation() == ("", None)


def test_an_operation_that_training_does_not_wait_for_is_not_shown(
    ranks: Ranks, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "_current", guard)
    seen: list[str] = []

    def look() -> None:
        now = ranks.now()
        seen.append(now.operation)

    guard.step(inner_step=1)
    with MonitoringCostTracker().track("background", blocking=False):
        look()

    def on_another_thread() -> None:
        with guard.track("upload check"):
            look()

    thread = threading.Thread(target=on_another_thread)
    thread.start()
    thread.join()
    with guard.track("whole training"):
        guard.step(inner_step=2)
        look()
    assert seen == ["", "", ""]
