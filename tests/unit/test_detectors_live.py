"""The live detectors: each fault gives its finding and only its finding, clean runs give none."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner_guard import events
from miner_guard.clock import FakeClock
from miner_guard.config import Config, GpuSettings, LossSettings, MinerSettings, StepSettings
from miner_guard.detectors.eta import TrainingFacts
from miner_guard.detectors.loss import LossWatch, OverfitWatch
from miner_guard.detectors.memory import MemoryWatch
from miner_guard.detectors.slow_cause import explain
from miner_guard.detectors.straggler import Straggler, judge
from miner_guard.detectors.trend import p_rising
from miner_guard.detectors.window import SortedWindow
from miner_guard.events import Finding
from miner_guard.rank import reports
from miner_guard.rank.flight import Step
from miner_guard.rank.layout import FLAG_FIRST, FLAG_LOSS_ON_CPU
from miner_guard.statedir import StateDir
from miner_guard.supervisor.parts import Context, Launch, Part
from miner_guard.supervisor.parts.curves import CurvesPart
from miner_guard.supervisor.parts.ranks import RanksPart
from miner_guard.supervisor.parts.steps import StepsPart
from tests.idle import IdleControl, IdleJobs

GIB = 1024**3
QUIET = {"inner_step", "step_lines_left_out", "fast_log", "timing_breakdown", "step_summary"}
UNKNOWN = TrainingFacts()


class Run:
    """A simulated run: steps of several ranks through all parts of this room, on a fake clock."""

    def __init__(self, folder: Path, config: Config | None = None, ranks: int = 2) -> None:
        self.clock = FakeClock()
        self.status: dict[str, Any] = {}
        context = Context(
            config or Config(),
            StateDir(folder),
            self.clock,
            "r",
            lambda _f: None,
            IdleJobs(),
            IdleControl(),
            lambda: self.status,
        )
        self.parts: list[Part] = [StepsPart(context), CurvesPart(context), RanksPart(context)]
        self.ranks = ranks
        self.number = 0
        self.seen: list[Finding] = []
        for part in self.parts:
            self._take(part.on_launch(Launch((), 1, 0, self.clock.monotonic())))

    def _take(self, found: Iterable[Finding]) -> None:
        for finding in found:
            self.seen.append(finding)
            for part in self.parts:
                self._take(part.on_finding(finding))

    def entry(self, **entry: Any) -> None:
        for part in self.parts:
            self._take(part.on_entry(0, entry))

    def step(
        self, seconds: float, loss: float, by_rank: Mapping[int, Mapping[str, Any]] | None = None, **extra: Any
    ) -> None:
        self.number += 1
        start = self.clock.monotonic()
        self.clock.advance(seconds)
        for rank in range(self.ranks):
            values: dict[str, Any] = {
                "outer_step": 1, "inner_step": self.number, "total_steps": self.number, "wall": 1e9, "loss": loss,
                "loss_given": True, "lr": 2e-4, "grad_norm": None, "allocated_bytes": 18 * GIB, "reserved_bytes": None,
                "tokens": None, "flags": FLAG_FIRST if self.number == 1 else 0, "phases": {"data": 0.01 * seconds},
                "nested_in_monitor_s": 0.0, **extra, **(by_rank or {}).get(rank, {}),
            }  # fmt: skip
            step = Step(number=self.number - 1, start=start, end=start + seconds, **values)
            for part in self.parts:
                self._take(part.on_steps(rank, [step]))
        for later in (0.0, 4.0):
            for part in self.parts:
                self._take(part.on_tick(self.clock.monotonic() + later, {}))

    def alarms(self) -> list[str]:
        """Events that a person would see, apart from the ordinary lines."""
        return [f.event for f in self.seen if f.event not in QUIET]

    def of(self, event: str) -> list[Finding]:
        return [f for f in self.seen if f.event == event]


def healthy(seed: int, seconds: float = 15.0, noise: float = 0.03) -> Iterator[tuple[float, float]]:
    """(step time, loss) of a healthy run: power-law descent with 2 % noise."""
    source = random.Random(seed)
    step = 0
    while True:
        step += 1
        yield seconds * source.gauss(1, noise), (2 + 5 * step**-0.3) * source.gauss(1, 0.02)


@pytest.mark.parametrize("seed", range(10))
def test_ten_clean_runs_say_nothing(tmp_path: Path, seed: int) -> None:
    run = Run(tmp_path, ranks=4)
    for _, (seconds, loss) in zip(range(1500), healthy(seed), strict=False):
        run.step(seconds, loss)
    assert run.alarms() == []


def test_a_clean_cpu_run_on_a_busy_host_cries_no_wolf(tmp_path: Path) -> None:
    run = Run(tmp_path)
    source = random.Random(3)
    for step in range(400):
        seconds = 0.3 * source.lognormvariate(0, 0.25) + (0.6 if source.random() < 0.01 else 0)
        run.step(seconds, 5 * (step + 1) ** -0.2, allocated_bytes=None)
    assert run.alarms() == []


def test_fault_slow(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for number, (_, loss) in zip(range(90), healthy(1), strict=False):
        run.step(8.3 if number == 40 else 0.3, loss, allocated_bytes=None, phases={"data": 8 if number == 40 else 0.01})
    assert run.alarms() == ["slow_step"]
    assert run.of("slow_step")[0].fields["inner_step"] == 41


def test_fault_nan_names_the_examples(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.entry(kind="training", effective_batch_size=16, batch_size=4)
    for number, (_, loss) in zip(range(90), healthy(1), strict=False):
        run.step(0.3, loss if number < 50 else math.nan, allocated_bytes=None)
    assert run.alarms() == ["loss_nan"]
    finding = run.of("loss_nan")[0]
    assert events.line(finding) == "Loss is NaN or Inf at step 51"
    assert finding.fields["examples"] == [51 * 16, 52 * 16 - 1]
    assert any("816 to 831" in fix for fix in finding.fields["fixes"])


def test_a_loss_of_zero_with_a_nan_gradient_norm_is_nan(tmp_path: Path) -> None:
    # HF Trainer shows a NaN loss as 0.0 (logging_nan_inf_filter), and the norm as it is.
    run = Run(tmp_path)
    for number, (_, loss) in zip(range(60), healthy(1), strict=False):
        bad = number >= 50
        run.step(0.3, 0.0 if bad else loss, grad_norm=math.nan if bad else 1.0, allocated_bytes=None)
    assert run.alarms() == ["loss_nan"]
    assert events.line(run.of("loss_nan")[0]) == "Loss is NaN or Inf at step 51"
    assert "gradient norm of nan" in run.of("loss_nan")[0].fields["detail"]


def test_a_nan_gradient_norm_beside_a_real_loss_is_only_a_skipped_step(tmp_path: Path) -> None:
    # fp16 with a gradient scaler: an overflow skips the step and lowers the scale.
    run = Run(tmp_path)
    for number, (_, loss) in zip(range(60), healthy(1), strict=False):
        run.step(0.3, loss, grad_norm=math.inf if number % 20 == 7 else 1.0, allocated_bytes=None)
    assert run.alarms() == []


@pytest.mark.parametrize("at", [12, 40, 200])
def test_fault_spike_is_a_remark_and_the_second_in_a_row_a_warning(tmp_path: Path, at: int) -> None:
    for length, levels in ((1, ["info"]), (2, ["info", "warning"])):
        run = Run(tmp_path)
        for number, (_, loss) in zip(range(300), healthy(1), strict=False):
            run.step(0.3, loss * (1.8 if at <= number < at + length else 1), allocated_bytes=None)
        assert [f.severity for f in run.of("loss_spike")] == levels
        assert set(run.alarms()) == {"loss_spike"}


def test_an_explosion_and_a_climb_are_divergence(tmp_path: Path) -> None:
    burst, climb = Run(tmp_path), Run(tmp_path)
    for number, (_, loss) in zip(range(400), healthy(1), strict=False):
        burst.step(0.3, loss * (5 if number >= 200 else 1))
        climb.step(0.3, loss * (1 + 0.004 * max(0, number - 200)))
    assert burst.of("loss_divergence")[0].severity == "critical"
    assert burst.of("loss_divergence")[0].fields["step"] <= 206
    assert climb.of("loss_divergence")[0].fields["step"] <= 300


def test_certain_cpu_fallback_names_rank_and_evidence(tmp_path: Path) -> None:
    run = Run(tmp_path, replace(Config(), gpu=GpuSettings(expect=2)))
    for _ in range(5):
        run.step(15.0, 3.0, by_rank={1: {"allocated_bytes": 0.05 * GIB, "flags": FLAG_LOSS_ON_CPU}})
    finding = run.of("cpu_fallback")[0]
    assert (finding.severity, finding.rank, finding.fields["verdict"]) == ("critical", 1, "certain")
    assert "0.05 GB" in events.line(finding)
    assert len(run.of("cpu_fallback")) == 1


def test_a_loss_copied_to_the_cpu_by_a_rank_that_holds_gpu_memory_is_no_fallback(tmp_path: Path) -> None:
    run = Run(tmp_path, replace(Config(), gpu=GpuSettings(expect=2)))
    for _ in range(5):
        run.step(15.0, 3.0, flags=FLAG_LOSS_ON_CPU)
    assert run.alarms() == []


def test_low_memory_and_slow_steps_are_suspected_then_cleared(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(6):
        run.step(245.7, 3.4, allocated_bytes=0.05 * GIB)
    for _ in range(12):
        run.step(15.0, 3.4)
    verdicts = [(f.fields["verdict"], f.severity) for f in run.of("cpu_fallback")]
    assert verdicts == [("suspected", "warning"), ("cleared", "info")]
    assert len(run.of("slow_step")) == 5


def test_gpus_that_nvml_shows_unused_are_evidence_and_throttling_explains(tmp_path: Path) -> None:
    gpu = {"state": "ok", "utilization_ratio": 0.0, "memory_used_bytes": 0.1 * GIB, "throttle": ["idle"]}
    for changes, event, words in (
        ({}, "cpu_fallback", "NVML shows no use: 1 GPUs, at most 0% busy"),
        ({"utilization_ratio": 1.0, "throttle": ["HW thermal"]}, "throughput_explained", "HW thermal on 1 GPU"),
    ):
        run = Run(tmp_path, ranks=1)
        run.status["health"] = {"gpus": {"state": "ok", "gpus": [{**gpu, **changes}]}}
        for _ in range(8):
            run.step(120.0, 3.0, allocated_bytes=None)
        assert words in events.line(run.of(event)[0])
        assert set(run.alarms()) == {"slow_step", event}


def test_diagnosis_makes_it_certain_unless_the_cpu_was_asked_for(tmp_path: Path) -> None:
    for expect, said in ((2, 1), (0, 0), ("auto", 0)):
        run = Run(tmp_path, replace(Config(), gpu=GpuSettings(expect=expect)))
        found_by_ranks = [{"rank": r, "model_device": "cpu", "offload": False} for r in range(2)]
        for part in reports.pack(found_by_ranks):
            run.entry(kind="diagnosis", report=part)
        for _ in range(20):
            run.step(0.3, 3.0, allocated_bytes=None)
        assert len(run.of("cpu_fallback")) == said
        assert len(run.alarms()) == said


def test_a_run_that_lastingly_takes_eight_times_as_long_without_a_gpu_is_suspected(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for number, (_, loss) in zip(range(120), healthy(1), strict=False):
        run.step(0.3 if number < 40 else 2.4, loss, allocated_bytes=None)
    assert [f.fields["verdict"] for f in run.of("cpu_fallback")] == ["suspected"]
    assert "8.0 times" in run.of("cpu_fallback")[0].fields["evidence"]
    assert set(run.alarms()) == {"slow_step", "cpu_fallback"}


@pytest.mark.parametrize("at", [8, 12, 14, 18])
@pytest.mark.parametrize("seed", range(4))
def test_a_fallback_soon_after_the_start_is_found_on_a_busy_host(tmp_path: Path, at: int, seed: int) -> None:
    # A run that falls back right after its warm-up, as `miner-guard demo --fault cpu-fallback@14` on a loaded host.
    run = Run(tmp_path, ranks=2)
    source = random.Random(seed)
    for number in range(1, 31):
        seconds = 1.4 * source.lognormvariate(0, 0.2) * (1 if number < at else 7)
        seconds += 4.0 if number == 1 else 0.0
        # One step in between is quick by chance: the others still last.
        run.step(4.0 if number == at + 2 else seconds, 3.0, allocated_bytes=None)
    assert [f.fields["verdict"] for f in run.of("cpu_fallback")] == ["suspected"]
    assert set(run.alarms()) == {"slow_step", "cpu_fallback"}
    assert run.of("slow_step")[0].fields["inner_step"] == max(at, StepSettings().warmup + 2)


@pytest.mark.parametrize("seed", range(10))
def test_a_short_clean_run_on_a_busy_host_cries_no_wolf(tmp_path: Path, seed: int) -> None:
    run = Run(tmp_path)
    source = random.Random(seed)
    for number in range(90):
        run.step(0.3 * source.lognormvariate(0, 0.3) + (3.0 if number == 0 else 0), 4.0, allocated_bytes=None)
    assert run.alarms() == []


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
    assert seen.arithmetic == "256 accumulation steps x 469 ms = 120s; 20s allow 42 (effective batch 84)"
    throttled = explain(120.0, {}, facts, StepSettings(), throttle_reasons=["sw_thermal_slowdown"])
    assert throttled is not None
    assert throttled.cause == "GPU throttled"
    waiting = explain(120.0, {"collective": 90}, facts, StepSettings())
    assert waiting is not None
    assert waiting.cause == "waiting in collectives"


def test_straggler_is_named_by_waiting_though_all_steps_last_the_same_and_cleared_when_gone(tmp_path: Path) -> None:
    run = Run(tmp_path, ranks=4)
    source = random.Random(5)
    for number in range(200):
        late = 3.0 if 60 <= number < 140 else 0.0
        rows = {
            rank: {"phases": {
                "data": 0.3 + (late if rank == 2 else 0), "forward": 5.0 * source.gauss(1, 0.02),
                "collective": max(0.0, 1.0 * source.gauss(1, 0.1) + (0 if rank == 2 else late)),
            }}
            for rank in range(4)
        }  # fmt: skip
        run.step(15.0 + late, 3.0, by_rank=rows)
    named = run.of("straggler")
    assert {f.rank for f in named} == {2}
    assert 2 <= len(named) <= 4
    assert named[0].fields["phase"] == "data"
    assert [f.rank for f in run.of("straggler_cleared")] == [2]
    assert set(run.alarms()) == {"straggler", "straggler_cleared"}


def test_a_slow_step_alone_names_no_straggler_and_the_fastest_rank_is_not_one() -> None:
    settings = StepSettings()
    fast_compute = [{"forward": 3.0, "backward": 3.0}] * 20
    slow_compute = [{"forward": 5.0, "backward": 5.0}] * 20
    assert judge({0: [10.0] * 20, 1: [10.0] * 20}, {0: fast_compute, 1: slow_compute}, settings) is None
    gathers = {0: [{"data": 0.1, "forward": 8.0}] * 20, 1: [{"data": 4.1, "forward": 4.0}] * 20}
    seen = judge({0: [9.0] * 20, 1: [9.0] * 20}, gathers, settings)
    assert isinstance(seen, Straggler)
    assert (seen.rank, seen.phase) == (1, "data")


def test_memory_leak_is_found_and_one_legitimate_allocation_is_not() -> None:
    leak, jump = MemoryWatch(LossSettings()), MemoryWatch(LossSettings())
    source = random.Random(2)
    leaks = [a for s in range(800) if (a := leak.observe(s, 18 + 0.005 * s + source.random() * 0.2))]
    jumps = [a for s in range(2000) if (a := jump.observe(s, 18 + (s > 700) + source.random() * 0.2))]
    assert [a.type for a in leaks] == ["memory_leak", "memory_leak"]
    assert leaks[0].at_step == 399
    assert jumps == []


def test_memory_drop_is_said_once() -> None:
    watch = MemoryWatch(LossSettings())
    seen = [a for s in range(200) if (a := watch.observe(s, 18.0 if s < 100 else 0.05))]
    assert [(a.type, a.at_step) for a in seen] == [("memory_drop", 102)]


def test_overfit_needs_a_gap_and_falling_training_loss() -> None:
    over, flat = OverfitWatch(LossSettings()), OverfitWatch(LossSettings())
    found = [a for n in range(30) if (a := over.observe(n * 100, 2 + 0.02 * abs(n - 8), 2.5 - 0.05 * n))]
    assert [a.type for a in found] == ["overfit"]
    assert found[0].evidence["best_step"] == 800
    remarks = [flat.observe(n * 100, max(2.0, 2.6 - 0.1 * n), 2.5 - 0.05 * n) for n in range(30)]
    assert remarks == [None] * 30


@pytest.mark.parametrize(
    "line", ["INFO | Validation Loss: {:.4f} (best so far)\n", "{{'eval_loss': {}, 'epoch': 1.0}}\n"]
)
def test_overfitting_is_seen_in_the_miners_own_lines_even_where_they_are_cut(tmp_path: Path, line: str) -> None:
    run = Run(tmp_path)
    for number, (_, loss) in zip(range(600), healthy(1), strict=False):
        run.step(0.3, loss)
        if number % 20 == 19:
            text = line.format(3.0 + 0.01 * abs(number // 20 - 8)).encode()
            for part in run.parts:
                for piece in (text[:17], text[17:]):
                    run._take(part.on_output(piece))
    assert run.alarms() == ["overfit"]
    assert run.of("overfit")[0].fields["evidence"]["best_step"] == 180


def test_convergence_and_plateau_are_remarks_with_different_words() -> None:
    source = random.Random(4)
    for start, word in ((8.0, "converged"), (2.05, "below its first level")):
        watch = LossWatch(LossSettings())
        seen = [
            a
            for s in range(4000)
            for a in watch.observe(s, (2 + (start - 2) * math.exp(-s / 100)) * source.gauss(1, 0.01), UNKNOWN)
        ]
        assert [a.severity for a in seen] == ["info"]
        assert word in seen[0].detail


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


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=200))
def test_no_loss_whatever_makes_the_judge_raise(values: list[float]) -> None:
    watch = LossWatch(LossSettings())
    for step, value in enumerate(values):
        list(watch.observe(step, value, UNKNOWN))


def test_p_rising_is_sure_only_where_it_can_be() -> None:
    source = random.Random(1)
    assert p_rising([i + source.gauss(0, 1) for i in range(40)]) > 0.999
    assert p_rising([-i + source.gauss(0, 1) for i in range(40)]) < 0.001
    assert p_rising([1.0] * 40) == 0.5


def test_settings_of_the_run_are_in_the_fixes(tmp_path: Path) -> None:
    run = Run(tmp_path, replace(Config(), miner=MinerSettings(effective_batch_size=512)))
    run.step(15.0, math.inf)
    assert "halve the learning rate: 0.0002 to 0.0001" in run.of("loss_nan")[0].fields["fixes"]


def test_the_entries_of_a_real_diagnosis_are_understood(tmp_path: Path) -> None:
    """Guards against a format that only one of the two sides knows: the evidence of every rank was lost."""
    run = Run(tmp_path)
    found_by_ranks = [{"rank": rank, "model_device": f"cuda:{rank}", "offload": False} for rank in range(2)]
    for part in reports.pack(found_by_ranks):
        run.entry(kind="diagnosis", t=1.0, report=part)
    for _ in range(30):
        run.step(15.0, 3.0)
    assert run.alarms() == []
