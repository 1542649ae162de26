"""A model that is not on its GPU: the evidence that makes it suspected or certain, and other
explanations for slow steps."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from miner_guard.config import Config, GpuSettings, StepSettings
from miner_guard.rank.layout import FLAG_LOSS_ON_CPU, StepRecord
from miner_guard.watch.progress import TrainingFacts
from miner_guard.watch.ranks import RanksMonitor, explain
from miner_guard.watch.steps import WARMUP
from tests.support.contexts import context
from tests.support.simulated_ranks import GIB, Run, healthy


def test_certain_cpu_fallback_names_rank_and_evidence(tmp_path: Path) -> None:
    run = Run(tmp_path, replace(Config(), gpu=GpuSettings(expect=2)))
    for _ in range(5):
        run.step(15.0, 3.0, by_rank={1: {"allocated_bytes": 0.05 * GIB, "flags": FLAG_LOSS_ON_CPU}})
    event = run.of("cpu_fallback")[0]
    assert (event.level, event.rank, event.fields["verdict"]) == ("critical", 1, "certain")
    assert "0.05 GB" in event.text
    assert len(run.of("cpu_fallback")) == 1


def test_a_loss_copied_to_the_cpu_by_a_rank_that_holds_gpu_memory_is_not_a_fallback(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, replace(Config(), gpu=GpuSettings(expect=2)))
    for _ in range(5):
        run.step(15.0, 3.0, flags=FLAG_LOSS_ON_CPU)
    assert run.alarms() == []


def test_a_model_that_was_moved_after_its_diagnosis_or_is_small_is_not_a_fallback(
    tmp_path: Path,
) -> None:
    moved = ("cpu", {"allocated_bytes": 18 * GIB})
    small = ("cuda:0", {"allocated_bytes": 0.4 * GIB, "flags": FLAG_LOSS_ON_CPU})
    for device, seen in (moved, small):
        run = Run(tmp_path, replace(Config(), gpu=GpuSettings(expect=2)))
        reports = [{"rank": r, "model_device": device, "offload": False} for r in range(2)]
        run.entry(kind="diagnosis", reports=reports)
        for _ in range(20):
            run.step(0.3, 3.0, **seen)
        assert run.of("cpu_fallback") == [], device


def test_low_memory_and_slow_steps_are_suspected_then_cleared(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(6):
        run.step(245.7, 3.4, allocated_bytes=0.05 * GIB)
    for _ in range(12):
        run.step(15.0, 3.4)
    verdicts = [(f.fields["verdict"], f.level) for f in run.of("cpu_fallback")]
    assert verdicts == [("suspected", "warning"), ("cleared", "info")]
    assert len(run.of("slow_step")) == 5


def test_what_cleared_before_it_was_reported_is_not_reported(tmp_path: Path) -> None:
    """`CPU FALLBACK … cleared` must not appear without a `CPU FALLBACK` before it."""
    monitor = RanksMonitor(context(tmp_path, config=replace(Config(), gpu=GpuSettings(expect=2))))
    small = {"allocated_bytes": 0.05 * GIB, "flags": FLAG_LOSS_ON_CPU}
    steps = [StepRecord(**(small if n == 1 else {"allocated_bytes": 18 * GIB})) for n in range(9)]
    list(monitor.on_steps(1, steps))
    assert list(monitor.on_tick(100.0, {})) == []


def test_gpus_that_nvml_shows_unused_are_evidence_and_throttling_explains(tmp_path: Path) -> None:
    gpu = {
        "state": "ok",
        "utilization_ratio": 0.0,
        "memory_used_bytes": 0.1 * GIB,
        "throttle": ["idle"],
    }
    for changes, event, words in (
        ({}, "cpu_fallback", "NVML shows no GPU in use: 1 GPU, at most 0% busy"),
        (
            {"utilization_ratio": 1.0, "throttle": ["HW thermal"]},
            "throughput_explained",
            "HW thermal on 1 GPU",
        ),
    ):
        run = Run(tmp_path, ranks=1)
        run.status["health"] = {"gpus": {"state": "ok", "gpus": [{**gpu, **changes}]}}
        for _ in range(8):
            run.step(120.0, 3.0, allocated_bytes=None)
        assert words in run.of(event)[0].text
        assert set(run.alarms()) == {"slow_step", event}


def test_diagnosis_makes_it_certain_unless_the_cpu_was_asked_for(tmp_path: Path) -> None:
    for expect, count in ((2, 1), (0, 0), ("auto", 0)):
        run = Run(tmp_path, replace(Config(), gpu=GpuSettings(expect=expect)))
        found_by_ranks = [{"rank": r, "model_device": "cpu", "offload": False} for r in range(2)]
        run.entry(kind="diagnosis", reports=found_by_ranks)
        for _ in range(20):
            run.step(0.3, 3.0, allocated_bytes=None)
        assert len(run.of("cpu_fallback")) == count
        assert len(run.alarms()) == count


def test_a_run_that_stays_eight_times_slower_without_a_gpu_is_suspected(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for number, (_, loss) in zip(range(120), healthy(1), strict=False):
        run.step(0.3 if number < 40 else 2.4, loss, allocated_bytes=None)
    assert [f.fields["verdict"] for f in run.of("cpu_fallback")] == ["suspected"]
    assert "GPU memory use is unknown" in run.of("cpu_fallback")[0].fields["evidence"]
    assert "8.0 times" in run.of("cpu_fallback")[0].fields["evidence"]
    assert set(run.alarms()) == {"slow_step", "cpu_fallback"}


@pytest.mark.parametrize("at", [8, 12, 14, 18])
@pytest.mark.parametrize("seed", range(4))
def test_a_fallback_soon_after_the_start_is_found_on_a_busy_host(
    tmp_path: Path, at: int, seed: int
) -> None:
    # A run that falls back right after its warm-up, as `miner-guard demo --fault cpu-fallback@14`
    # on a loaded host.
    run = Run(tmp_path, ranks=2)
    source = random.Random(seed)
    for number in range(1, 31):
        seconds = 1.4 * source.lognormvariate(0, 0.2) * (1 if number < at else 7)
        seconds += 4.0 if number == 1 else 0.0
        # One step in between is fast by chance, but the others are still slow.
        run.step(4.0 if number == at + 2 else seconds, 3.0, allocated_bytes=None)
    assert [f.fields["verdict"] for f in run.of("cpu_fallback")] == ["suspected"]
    assert set(run.alarms()) == {"slow_step", "cpu_fallback"}
    assert run.of("slow_step")[0].fields["inner_step"] == max(at, WARMUP + 2)


def test_a_single_process_without_a_gpu_that_slows_down_is_not_on_the_wrong_device(
    tmp_path: Path,
) -> None:
    for gpus, suspected in (({"state": "absent", "gpus": []}, 0), (None, 1)):
        run = Run(tmp_path, ranks=1)
        run.status["health"] = {"gpus": gpus}
        for number in range(60):
            run.step(0.5 if number < 30 else 5.0, 3.0, allocated_bytes=None)
        assert len(run.of("cpu_fallback")) == suspected


def test_waiting_for_data_is_not_called_cpu_fallback(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for number, (_, loss) in zip(range(80), healthy(1), strict=False):
        seconds = 15.0 if number < 40 else 100.0
        run.step(seconds, loss, phases={"data": seconds - 14})
    assert not run.of("cpu_fallback")
    assert run.of("throughput_explained")[0].fields["cause"] == "starved by data"


def test_source_004s_problem_2_is_explained_with_its_arithmetic() -> None:
    facts = TrainingFacts(batch_size=2, effective_batch_size=512, accumulation_steps=256)
    seen = explain(120.0, {"forward": 40, "backward": 70}, facts, StepSettings())
    assert seen is not None
    assert seen.cause == "accumulation too high"
    assert (
        seen.arithmetic
        == "256 accumulation steps x 469 ms = 120s; 20s would fit 42 (effective batch 84)"
    )
    throttled = explain(120.0, {}, facts, StepSettings(), throttle_reasons=["sw_thermal_slowdown"])
    assert throttled is not None
    assert throttled.cause == "GPU throttled"
    waiting = explain(120.0, {"collective": 90}, facts, StepSettings())
    assert waiting is not None
    assert waiting.cause == "waiting in collectives"
