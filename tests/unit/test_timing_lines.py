"""Fast log, timing breakdown and red flags, with source 001's lines and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miner_guard.config import Config, MinerSettings, StepSettings
from miner_guard.rank.environment import find
from miner_guard.rank.guard import Guard
from miner_guard.record.events import Event
from miner_guard.system.clock import FakeClock
from miner_guard.watch import steps as timing
from miner_guard.watch.steps import StepsMonitor
from tests.support.contexts import context
from tests.support.driven_steps import Steps, lines, make_step
from tests.support.ranks import Ranks


def flags(found: Iterable[Event]) -> list[Event]:
    """The remarks and red flags."""
    return [event for event in found if "which" in event.fields]


def test_timing_lines_continue_where_the_miner_counts_its_steps_from_0_again() -> None:
    log = timing.TimingLog(StepSettings())
    messages = [
        n
        for n, step in enumerate([*range(40), *range(40)])
        if log.observe(make_step(step, 0.0, 15.0, phases={"monitor": 0.1}))
    ]
    assert messages == [10, 20, 30, 40, 50, 60, 70]


def test_fast_log_and_breakdown_come_at_their_steps_with_source_001s_numbers(
    tmp_path: Path,
) -> None:
    steps = Steps(tmp_path)
    fast = {"monitor": 0.123, "example_loss": 0.045}
    seen = steps.drive([15.0] * 199, phases=fast, nested_in_monitor_s=0.045)
    assert (
        lines(seen, "fast_log")[0] == "Fast log time: 0.123s (loss calc: 0.045s, overhead: 0.078s)"
    )
    assert len(lines(seen, "fast_log")) == 19
    full = {"monitor": 8.234, "inference": 6.123, "val_loss": 1.456, "example_loss": 0.345}
    seen = steps.drive([23.0], phases=full, nested_in_monitor_s=7.924)
    assert lines(seen, "timing_breakdown")[1:] == [
        "TIMING BREAKDOWN (Step 200):\n"
        "   Total:          8.234s\n"
        "   Inference:      6.123s (74.4%)\n"
        "   Val Loss:       1.456s (17.7%)\n"
        "   Example Loss:   0.345s (4.2%)\n"
        "   Overhead:       0.310s (3.8%)"
    ]
    assert not flags(seen)
    assert not lines(seen, "fast_log")


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    """Steps before the one with the breakdown."""
    steps = Steps(tmp_path)
    steps.drive([15.0] * 199)
    return steps


def test_an_overhead_of_twelve_per_cent_is_a_remark(steps: Steps) -> None:
    """Source 001: above 10 % there is an issue, above 20 % a red flag."""
    full = {"monitor": 8.0, "inference": 5.6, "val_loss": 1.44}
    seen = steps.drive([23.0], phases=full, nested_in_monitor_s=7.04)
    assert [f.text for f in flags(seen)] == [
        "TIMING REMARK: overhead: 12.0% of 8.000s (usual below 10%): "
        "1-5% is typical; optimize the costly parts"
    ]


@pytest.mark.parametrize(
    ("phases", "nested", "remarks"),
    [
        ({"monitor": 0.25}, 0.0, []),
        ({"monitor": 0.4}, 0.0, ["fast log: 0.400s (usual below 0.3s)"]),
        ({"monitor": 8.0, "inference": 6.2, "val_loss": 1.5}, 7.7, []),
        (
            {"monitor": 8.0, "inference": 6.8, "val_loss": 0.8},
            7.6,
            ["inference: 85.0% of 8.000s (usual below 80%)"],
        ),
        (
            {"monitor": 8.0, "inference": 4.8, "val_loss": 2.8},
            7.6,
            ["validation: 35.0% of 8.000s (usual below 20%)"],
        ),
        (
            {"monitor": 16.0, "inference": 12.0, "val_loss": 3.2},
            15.2,
            ["evaluation: 16.000s (usual below 10s)"],
        ),
        (
            {"monitor": 8.0, "inference": 3.2, "val_loss": 0.24, "example_loss": 4.0},
            7.6,
            [
                "inference: 40.0% of 8.000s (usual above 60%)",
                "validation: 3.0% of 8.000s (usual above 10%)",
                "example loss: 50.0% of 8.000s (usual below 5%)",
            ],
        ),
        # A trainer that only validates: that validation is 100 % of it must raise no red flag.
        ({"val_loss": 8.0}, 0.0, []),
        ({"inference": 8.0}, 0.0, []),
    ],
)
def test_the_expected_patterns_of_source_001(
    steps: Steps, phases: Mapping[str, float], nested: float, remarks: list[str]
) -> None:
    """Fast logs 0.1-0.3 s, evaluations 5-10 s, inference 60-80 %, validation 10-20 %, an example's
    loss 2-5 %. Inference at 40 % and an example loss at 50 % once passed in silence."""
    seen = steps.drive([25.0], phases=phases, nested_in_monitor_s=nested)
    seen += steps.drive([25.0] * 400, phases=phases, nested_in_monitor_s=nested)
    assert lines(seen, "fast_log") or lines(seen, "timing_breakdown")
    assert {f.level for f in flags(seen)} <= {"info"}
    assert [f.text.split("): ")[0] + ")" for f in flags(seen)] == [
        f"TIMING REMARK: {remark}" for remark in remarks
    ]


@pytest.mark.parametrize(
    ("phases", "nested", "which"),
    [
        ({"monitor": 1.5}, 0.0, "fast log"),
        ({"monitor": 10.0, "inference": 7.0}, 7.0, "overhead"),
        ({"monitor": 10.0, "inference": 9.5}, 9.5, "inference"),
        ({"monitor": 10.0, "inference": 3.0, "val_loss": 6.0}, 9.0, "validation"),
    ],
)
def test_each_red_flag_says_which(
    steps: Steps, phases: Mapping[str, float], nested: float, which: str
) -> None:
    seen = steps.drive([25.0], phases=phases, nested_in_monitor_s=nested)
    assert [f.fields["which"] for f in flags(seen) if f.level == "warning"] == [which]


def test_source_001s_lines_come_out_of_the_hooks_own_phases(tmp_path: Path) -> None:
    """From `with guard.phase(…)` in a rank, through the flight record, to the words on the
    console."""
    clock = FakeClock()
    ranks = Ranks()
    guard = Guard(find(ranks.env), clock.monotonic)

    def spend(name: str, seconds: float) -> None:
        with guard.phase(name):
            clock.advance(seconds)

    for step in range(1, 201):
        spend("forward", 15.0)
        with guard.phase("monitor"):
            clock.advance(0.078)
            spend("example_loss", 0.045)
            if step == 200:
                spend("inference", 6.123)
                spend("val_loss", 1.456)
        guard.step(outer_step=56, inner_step=step, loss=3.4, lr=2.1e-5)
    monitor = StepsMonitor(context(tmp_path, clock=clock))
    seen = list(monitor.on_steps(0, ranks.steps()))
    assert set(lines(seen, "fast_log")) == {
        "Fast log time: 0.123s (loss calc: 0.045s, overhead: 0.078s)"
    }
    assert len(lines(seen, "fast_log")) == 19
    block = lines(seen, "timing_breakdown")[1].splitlines()
    assert block[0] == "TIMING BREAKDOWN (Step 200):"
    assert block[2] == "   Inference:      6.123s (79.5%)"
    assert block[5] == "   Overhead:       0.078s (1.0%)"
    assert not flags(seen)
    assert monitor.snapshot()["goodput"]["evaluation_and_monitoring"] == pytest.approx(
        (200 * 0.123 + 7.579) / (200 * 15.123 + 7.579)
    )


@pytest.mark.parametrize(("attach", "number"), [("auto", 20), (None, 21)])
def test_the_first_evaluation_has_a_breakdown_with_the_step_it_follows(
    tmp_path: Path, attach: Any, number: int
) -> None:
    """With an evaluation every 20 steps, the first breakdown came at step 200; Transformers'
    evaluation after step 200 was that of step 201."""
    config = replace(Config(), miner=MinerSettings(attach=attach))
    steps = Steps(tmp_path, config=config)
    steps.drive([15.0] * 20)
    seen = steps.drive([23.0], phases={"val_loss": 8.0})
    assert [line.partition("\n")[0] for line in lines(seen, "timing_breakdown")] == [
        f"TIMING BREAKDOWN (Step {number}):"
    ]


def test_a_monitoring_callback_is_no_slow_step(tmp_path: Path) -> None:
    """The loss of an example took the second that made the step slow."""
    steps = Steps(tmp_path)
    steps.drive([0.05] * 40)
    phases = {"monitor": 2.0, "inference": 0.8, "example_loss": 1.0}
    assert not lines(steps.drive([2.05], phases=phases, nested_in_monitor_s=1.8), "slow_step")
    assert lines(steps.drive([2.05], phases={"inference": 0.8}), "slow_step")
