"""The `steps` monitor reports what the flight record shows, in the documents' words, and no more
often than configured."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from miner_guard.checks.health import assemble, summary
from miner_guard.cli import screen
from miner_guard.config import Config, GateSettings, LogSettings, MinerSettings
from miner_guard.guard.engines import monitor_values
from miner_guard.rank import layout
from miner_guard.rank.journal import TrainingEntry
from miner_guard.record.events import Event, event
from miner_guard.record.lines import json_line
from miner_guard.record.status_document import StatusDocument
from miner_guard.show import metrics, page
from miner_guard.state_dir import StateDir, finite
from miner_guard.watch.base import Exit
from miner_guard.watch.steps import StepsMonitor
from tests.support.contexts import context
from tests.support.driven_steps import Steps, lines, make_step
from tests.support.present_state import write_status
from tests.support.simulated_ranks import headers


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(tmp_path)


def test_a_cpu_like_step_is_slow_in_the_documents_words(steps: Steps) -> None:
    seen = steps.drive([15.2, 245.7])
    assert lines(seen, "inner_step")[0] == (
        "Outer Step: 5 | Inner Step: 1 | LR: 0.00002100 | Loss: 3.00 | Step Time: "
        "15.2s | GPU Mem: 18.45GB"
    )
    assert lines(seen, "slow_step") == ["SLOW STEP: 245.7s (expected 10-30s) - Check GPU usage!"]
    unknown = steps.drive([15.2], allocated_bytes=None)
    assert lines(unknown, "inner_step")[0].endswith("GPU Mem: unknown")


def test_a_slow_step_without_a_gpu_does_not_advise_to_check_one(tmp_path: Path) -> None:
    """`Check GPU usage!` is useless on a machine that has no GPU."""
    status = {"health": {"gpus": {"state": "absent"}}}
    steps = Steps(tmp_path, status=lambda: status)
    seen = steps.drive([15.2, 245.7])
    assert lines(seen, "slow_step") == ["SLOW STEP: 245.7s (expected 10-30s)"]


def test_a_slow_step_with_little_gpu_memory_is_reported_once(steps: Steps) -> None:
    """Source 004's second line after a slow step."""
    seen = steps.drive([15.2, 245.7, 245.7], allocated_bytes=0.05 * 1024**3)
    assert lines(seen, "low_gpu_memory") == ["LOW GPU MEMORY: Model may be on CPU!"]
    assert not lines(steps.drive([245.7]), "low_gpu_memory")


def summaries(found: list[Event]) -> list[str]:
    return [line for line in lines(found, "timing_breakdown") if line.startswith("STEP SUMMARY")]


@pytest.mark.parametrize(
    ("memory_gb", "grade"),
    [(0.05, "bad"), (5.0, "poor"), (12.0, "acceptable"), (18.45, "good"), (60.0, "high")],
)
def test_gpu_memory_is_graded_by_the_documents_table(
    steps: Steps, memory_gb: float, grade: str
) -> None:
    """Source 004, benchmarks: 15-35 GB good, 10-15 GB acceptable, < 1 GB bad."""
    seen = steps.drive([15.0] * 201, allocated_bytes=memory_gb * 1024**3)
    assert summaries(seen)[0].endswith(f"GPU memory {memory_gb:.1f}GB, grade {grade}")


def test_each_ranks_peak_memory_is_in_the_status(steps: Steps) -> None:
    steps.drive([15.0])
    peak = event(
        "gpu_usage",
        "info",
        "GPU MEMORY: Allocated: 8.42 GB | Reserved: 9.50 GB | Peak: 13.21 GB",
        rank=0,
        allocated_gb=8.42,
        reserved_gb=9.5,
        peak_gb=13.21,
    )
    steps.monitor.on_event(peak)
    assert peak.text == ("GPU MEMORY: Allocated: 8.42 GB | Reserved: 9.50 GB | Peak: 13.21 GB")
    assert steps.monitor.snapshot()["per_rank"]["0"]["gpu_peak_gb"] == 13.21


def test_a_miner_that_prints_its_steps_shows_each_step_once(steps: Steps) -> None:
    """`grep "Outer Step:" | tail -50` must not show 25 steps, each twice."""
    steps.monitor.on_lines(
        [b"Outer Step: 5 | Inner Step: 1 | Learning Rate: 0.00002100 | Loss: 3.00"]
    )
    assert lines(steps.drive([15.2]), "inner_step") == [
        "Inner Step: 1 | Step Time: 15.2s | GPU Mem: 18.45GB"
    ]


def test_a_step_is_slow_against_its_like(steps: Steps) -> None:
    noise = random.Random(1)
    assert not lines(steps.drive([2.0 * noise.gauss(1, 0.03) for _ in range(200)]), "slow_step")
    slow = [f for f in steps.drive([6.0]) if f.name == "slow_step"]
    assert slow[0].fields["rule"] == "relative"
    assert slow[0].fields["median_s"] == pytest.approx(2.0, rel=0.05)
    again = [f for f in steps.drive([2.0, 7.0]) if f.name == "slow_step"]
    assert [(f.level, f.fields["step_time_s"]) for f in again] == [("debug", 7.0)], (
        "for the report, not to be read"
    )
    regular = steps.drive(([2.0] * 29 + [6.0]) * 6)
    scheduled = {f.level for f in regular if f.fields.get("weight") == "scheduled"}
    assert scheduled == {"debug"}, "work that recurs at an interval is no warning"


def test_an_upload_inside_a_step_does_not_make_it_slow(steps: Steps) -> None:
    steps.drive([15.0] * 30)
    assert not lines(steps.drive([615.0], phases={"upload": 600.0}), "slow_step")
    assert lines(steps.drive([700.0], phases={"upload": 600.0}), "slow_step")


def test_snapshot_has_percentiles_eta_and_goodput_that_adds_up(tmp_path: Path) -> None:
    config = replace(
        Config(), miner=MinerSettings(upload_steps=3), gate=GateSettings(min_inner_step=50)
    )
    steps = Steps(tmp_path, config=config)
    steps.clock.advance(100)
    list(
        steps.monitor.on_entry(
            0, TrainingEntry(effective_batch_size=512, inner_steps_per_outer=500)
        )
    )
    steps.drive([15.0] * 40, phases={"data": 3.0})
    shot = steps.monitor.snapshot()
    assert (shot["p50_s"], shot["p95_s"], shot["max_s"], shot["grade"]) == (
        15.0,
        15.0,
        15.0,
        "good",
    )
    assert shot["eta_upload_s"] == (51 - 40) * 15
    assert shot["eta_outer_s"] == 460 * 15
    assert sum(shot["goodput"].values()) == pytest.approx(1)
    assert shot["goodput"]["data"] == pytest.approx(120 / 700)
    assert shot["goodput"]["init"] == pytest.approx(100 / 700)


def test_time_lost_to_a_hang_and_to_a_restart_is_distinguished(steps: Steps) -> None:
    steps.drive([10.0] * 20)
    steps.clock.advance(300)
    steps.monitor.on_event(
        event(
            "hang_detected",
            "critical",
            "HANG DETECTED: ",
            detail="",
            culprits=[0],
            idle_s=300,
            limit_s=300,
        )
    )
    list(steps.monitor.on_exit(Exit(137, 9, True, False, 500)))
    steps.clock.advance(50)
    steps.launch(1)
    steps.clock.advance(50)
    shares = steps.monitor.snapshot()["goodput"]
    assert shares["hang"] == pytest.approx(0.5)
    assert shares["restart"] == pytest.approx(100 / 600)


def test_goodput_falls_while_a_hang_waits_for_its_detection(steps: Steps) -> None:
    """Goodput must not rise during the minutes when no rank is stepping."""
    steps.drive([10.0] * 20)
    steps.clock.advance(58)
    shares = steps.monitor.snapshot()["goodput"]
    assert shares["hang"] == pytest.approx(58 / 258)
    steps.drive([10.0])
    after = steps.monitor.snapshot()["goodput"]
    assert after["hang"] == pytest.approx(58 / 268), "a step that came after all still stalled"


def test_the_time_after_a_finish_is_not_lost_to_a_restart(steps: Steps) -> None:
    steps.drive([10.0] * 20)
    steps.clock.advance(60)
    list(steps.monitor.on_exit(Exit(0, None, False, True, 260)))
    steps.clock.advance(600)
    shares = steps.monitor.snapshot()["goodput"]
    assert shares["restart"] == 0
    assert shares["training"] == pytest.approx(1)


def test_unknown_stays_unknown(tmp_path: Path) -> None:
    shot = StepsMonitor(context(tmp_path)).snapshot()
    assert shot["loss"] is None
    assert shot["p50_s"] is None
    assert shot["goodput"] == {}


def test_after_a_new_rendezvous_only_the_present_ranks_report(tmp_path: Path) -> None:
    """Otherwise a node would log no more steps, because a rank that has moved to another node would
    still be its lead rank."""
    monitor = StepsMonitor(context(tmp_path))
    list(monitor.on_steps(0, [make_step(1, 0.0, 15.0)]))
    list(monitor.on_tick(16.0, headers(4, 5)))
    assert lines(monitor.on_steps(4, [make_step(2, 15.0, 15.0)]), "inner_step")
    assert monitor.snapshot()["inner_step"] == 2


def test_a_loss_that_is_not_a_number_is_reported_everywhere_in_the_same_word(
    steps: Steps, tmp_path: Path
) -> None:
    """`loss ?` and null say that nothing was measured, so they must not stand for NaN."""
    (line,) = [
        f for f in steps.drive([1.0], loss=math.nan, grad_norm=math.inf) if f.name == "inner_step"
    ]
    assert " | Loss: NaN | " in line.text
    record = json.loads(json_line({**line.fields}))
    assert (record["loss"], record["grad_norm"], record["eval_loss"]) == ("NaN", "Infinity", None)
    steps = json.loads(json.dumps(finite(steps.monitor.snapshot()), allow_nan=False))
    status = {"state": "running", "steps": steps}
    document = StatusDocument.from_json(status)
    assert "loss NaN" in summary(
        assemble(
            status, host=None, gpus=None, guard={"cpu_pct": None, "memory_bytes": None}, unknown={}
        )
    )
    assert any(row.startswith("loss   NaN") for row in screen.lines(document, (80, None)))
    assert monitor_values(status)["Loss"] == "NaN"
    exposition = metrics.exposition(document, version="1")[0]
    assert b"minerguard_loss NaN" in exposition
    assert b"minerguard_gradient_norm +Inf" in exposition
    write_status(tmp_path, status)
    assert re.search("NaN.{0,40}loss|loss.{0,40}NaN", page.render(StateDir(tmp_path)))


@pytest.mark.parametrize(
    ("flags", "remark"),
    [
        (0, ""),
        (2 << layout.LOSS_LAG_SHIFT, " (of step 82)"),
        (layout.FLAG_LOSS_SUMMED, " (sum of the losses passed to backward)"),
    ],
)
def test_a_loss_that_is_not_simply_the_steps_is_marked(
    tmp_path: Path, flags: int, remark: str
) -> None:
    """A loss of another step, or of several objectives, must not read like the step's own."""
    monitor = StepsMonitor(context(tmp_path))
    (line,) = lines(monitor.on_steps(0, [make_step(84, 0.0, 15.0, flags=flags)]), "inner_step")
    assert f"| Loss: 3.00{remark} |" in line


def test_a_step_made_slow_by_a_monitoring_operation_names_it(steps: Steps) -> None:
    steps.drive([15.2])
    since = steps.clock.monotonic() + 5.0
    header = replace(headers(0)[0], operation="evolution_snapshot", operation_since=since)
    steps.monitor.on_tick(since + 235.0, {0: header})
    seen = steps.drive([245.7])
    assert lines(seen, "slow_step") == [
        "SLOW STEP: 245.7s (expected 10-30s) - 235s of it in evolution_snapshot"
    ]


def test_the_recent_steps_are_summed_up_with_what_the_limit_left_out(tmp_path: Path) -> None:
    config = Config()
    config = replace(
        config,
        steps=replace(config.steps, breakdown_every=30),
        logs=LogSettings(step_lines_per_s=5),
    )
    steps = Steps(tmp_path, config=config)
    found = steps.drive([15.0] * 20 + [18.0] + [15.0] * 9 + [0.1] * 30)
    first, last = summaries(found)
    assert first == (
        "STEP SUMMARY: p50 15.00s p95 15.15s max 18.00s, grade good | GPU memory 18.4GB, grade good"
    )
    left_out = 60 - len(lines(found, "inner_step"))
    assert left_out > 10
    assert last.endswith(f" | {left_out} step lines left out (limit 5/s)")
