"""The live detectors together: clean runs are silent, and a slow step or a straggler raises only
its own alarm."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner_guard.config import StepSettings
from miner_guard.watch.ranks import Straggler, judge
from miner_guard.watch.series import SortedWindow
from miner_guard.watch.steps import SlowWarnings, StepTimes
from tests.support.simulated_ranks import Run, healthy


@pytest.mark.parametrize("seed", range(10))
def test_ten_clean_runs_say_nothing(tmp_path: Path, seed: int) -> None:
    run = Run(tmp_path, ranks=4)
    for _, (seconds, loss) in zip(range(1500), healthy(seed), strict=False):
        run.step(seconds, loss)
    assert run.alarms() == []


def test_a_clean_cpu_run_on_a_busy_host_raises_no_alarm(tmp_path: Path) -> None:
    run = Run(tmp_path)
    source = random.Random(3)
    for step in range(400):
        seconds = 0.3 * source.lognormvariate(0, 0.25) + (0.6 if source.random() < 0.01 else 0)
        run.step(seconds, 5 * (step + 1) ** -0.2, allocated_bytes=None)
    assert run.alarms() == []


def test_a_rank_that_computes_longer_is_named_under_a_per_step_all_reduce(tmp_path: Path) -> None:
    """The others wait outside all phases, where the miner averages the loss of each step."""
    run = Run(tmp_path, ranks=4)
    quick, slow = {"forward": 0.1, "backward": 0.2}, {"forward": 0.5, "backward": 1.0}
    for _ in range(60):
        by_rank = {rank: {"phases": slow if rank == 2 else quick} for rank in range(4)}
        run.step(1.6, 3.0, by_rank=by_rank)
    assert {f.rank for f in run.of("straggler")} == {2}


def test_fault_slow(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for number, (_, loss) in zip(range(90), healthy(1), strict=False):
        run.step(
            8.3 if number == 40 else 0.3,
            loss,
            allocated_bytes=None,
            phases={"data": 8 if number == 40 else 0.01},
        )
    assert run.alarms() == ["slow_step"]
    assert run.of("slow_step")[0].fields["inner_step"] == 41


def warnings_of(run: Run) -> list[str]:
    return [f.name for f in run.seen if f.level not in ("debug", "info")]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("usual_s", [3.0, 15.0])
def test_a_slowdown_that_lasts_is_one_alarm(tmp_path: Path, seed: int, usual_s: float) -> None:
    """There must not be two alarms, one for the slow steps and one for the lasting change."""
    run, source = Run(tmp_path), random.Random(seed)
    for number in range(400):
        seconds = usual_s * source.gauss(1, 0.05) * (1 if number < 200 else 1.8)
        run.step(seconds, 4.0, allocated_bytes=None)
    assert warnings_of(run) == ["steps_regressed"]
    assert run.of("steps_regressed")[0].fields["inner_step"] < 220


@pytest.mark.parametrize("seed", range(10))
def test_slow_steps_that_end_soon_are_one_alarm_about_slow_steps(tmp_path: Path, seed: int) -> None:
    run, source = Run(tmp_path), random.Random(seed)
    for number in range(400):
        seconds = 15 * source.gauss(1, 0.05) * (1.8 if 200 <= number < 205 else 1)
        run.step(seconds, 4.0, allocated_bytes=None)
    assert warnings_of(run) == ["slow_step"]


def test_slow_steps_right_before_the_end_are_reported_at_the_end(tmp_path: Path) -> None:
    steps = StepTimes(StepSettings())
    warnings = SlowWarnings[int]()
    seen = [
        late
        for number in range(104)
        for late in warnings.observe(
            number, steps.observe(15.0 if number < 100 else 27.0), lasts=False
        )
    ]
    assert not [slow for _, slow in seen if slow.certain]
    [(number, slow)] = warnings.release()
    assert (number, slow.certain) == (102, True)


@pytest.mark.parametrize("seed", range(10))
def test_a_short_clean_run_on_a_busy_host_raises_no_alarm(tmp_path: Path, seed: int) -> None:
    run = Run(tmp_path)
    source = random.Random(seed)
    for number in range(90):
        run.step(
            0.3 * source.lognormvariate(0, 0.3) + (3.0 if number == 0 else 0),
            4.0,
            allocated_bytes=None,
        )
    assert run.alarms() == []


def test_a_straggler_is_named_by_waiting_and_cleared_although_all_steps_take_equally_long(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, ranks=4)
    source = random.Random(5)
    for number in range(200):
        late = 3.0 if 60 <= number < 140 else 0.0
        rows = {
            rank: {
                "phases": {
                    "data": 0.3 + (late if rank == 2 else 0),
                    "forward": 5.0 * source.gauss(1, 0.02),
                    "collective": max(0.0, 1.0 * source.gauss(1, 0.1) + (0 if rank == 2 else late)),
                }
            }
            for rank in range(4)
        }
        run.step(15.0 + late, 3.0, by_rank=rows)
    named = run.of("straggler")
    assert {f.rank for f in named} == {2}
    assert 2 <= len(named) <= 4
    assert named[0].fields["phase"] == "data"
    assert [f.rank for f in run.of("straggler_cleared")] == [2]
    assert set(run.alarms()) == {"straggler", "straggler_cleared"}


def test_after_a_new_rendezvous_the_present_ranks_are_compared(tmp_path: Path) -> None:
    """Otherwise the guard would wait for a rank that has gone to another node, and never name or
    clear a straggler."""
    run = Run(tmp_path, ranks=2)

    def lag(culprit: int) -> None:
        for _ in range(60):
            rows = {
                rank: {
                    "phases": {"data": 3.5, "collective": 0.1}
                    if rank == culprit
                    else {"collective": 3.6}
                }
                for rank in run.ranks
            }
            run.step(15.0, 3.0, by_rank=rows)

    lag(1)
    assert {f.rank for f in run.of("straggler")} == {1}
    run.renumber(4, 5)
    assert [f.rank for f in run.of("straggler_cleared")] == [1]
    lag(4)
    assert {f.rank for f in run.of("straggler")} == {1, 4}
    run.launch()
    assert run.monitors[2].snapshot()["straggler"] is None


def test_a_slow_step_alone_names_no_straggler_and_the_fastest_rank_is_not_one() -> None:
    settings = StepSettings()
    fast_compute = [{"forward": 3.0, "backward": 3.0}] * 20
    slow_compute = [{"forward": 5.0, "backward": 5.0}] * 20
    assert (
        judge({0: [10.0] * 20, 1: [10.0] * 20}, {0: fast_compute, 1: slow_compute}, settings)
        is None
    )
    gathers = {0: [{"data": 0.1, "forward": 8.0}] * 20, 1: [{"data": 4.1, "forward": 4.0}] * 20}
    seen = judge({0: [9.0] * 20, 1: [9.0] * 20}, gathers, settings)
    assert isinstance(seen, Straggler)
    assert (seen.rank, seen.phase) == (1, "data")


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=80), st.integers(1, 40))
def test_the_window_agrees_with_sorting(values: list[float], size: int) -> None:
    window = SortedWindow(size)
    for value in values:
        window.add(value)
    kept = sorted(values[-size:])
    middle = (kept[(len(kept) - 1) // 2] + kept[len(kept) // 2]) / 2
    assert window.median == pytest.approx(middle)
    distances = sorted(abs(v - window.median) for v in kept)
    mad = (distances[(len(kept) - 1) // 2] + distances[len(kept) // 2]) / 2
    assert window.mad() == pytest.approx(mad, rel=1e-9, abs=1e-6)
