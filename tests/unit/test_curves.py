"""Loss and memory of a running miner: NaN, spike, divergence, plateau, overfitting and leak are
found, and none of them in noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner_guard.config import Config, LossSettings, MinerSettings
from miner_guard.rank.layout import StepRecord
from miner_guard.watch.curves import LossWatch, MemoryWatch, OverfitWatch, judge
from miner_guard.watch.trace_reading import Trace
from tests.support.simulated_ranks import Run, healthy


def test_fault_nan_names_the_examples(tmp_path: Path) -> None:
    run = Run(tmp_path, ranks=1)
    run.entry(kind="training", effective_batch_size=16, batch_size=4)
    for number, (_, loss) in zip(range(90), healthy(1), strict=False):
        run.step(0.3, loss if number < 50 else math.nan, allocated_bytes=None)
    assert run.alarms() == ["loss_nan"]
    event = run.of("loss_nan")[0]
    assert event.text == "Loss is NaN or Inf at step 51 (examples 816-831)"
    assert event.fields["examples"] == [51 * 16, 52 * 16 - 1]
    assert "816 to 831" in event.fields["fixes"][0]


def test_the_examples_of_a_nan_are_counted_over_all_outer_steps(tmp_path: Path) -> None:
    """Inner step 5 of the second outer step once gave "examples 80-95" for 1280-1295."""
    run = Run(tmp_path, ranks=4)
    run.entry(kind="training", effective_batch_size=16)
    for number in range(1, 81):
        place = {"outer_step": 1 + number // 76, "inner_step": (number - 1) % 75 + 1}
        run.step(15.0, 3.0 if number < 80 else math.nan, **place)
    assert [event.text for event in run.of("loss_nan")] == [
        "Loss is NaN or Inf at step 5 on ranks 0-3 (examples 1280-1295)"
    ]


BAD = math.nan
NAN_CAUSES: dict[str, tuple[list[float], list[str]]] = {
    "from the start": ([BAD] * 9, ["weights that were loaded"]),
    "in the first steps": ([9.0, 8.0, 9.5, *[BAD] * 9], ["no warmup"]),
    "after a climb": ([3.0] * 99 + [7.0, 30.0] + [BAD] * 9, ["the loss rose before it"]),
    "at one step": ([3.0] * 99 + [BAD] * 9, ["bad data at this step"]),
    "at random": (
        [3.0] * 99 + [BAD] + [3.0] * 40 + [BAD] + [3.0] * 9,
        ["bad data at this step", "mixed precision"],
    ),
}


@pytest.mark.parametrize(("losses", "causes"), NAN_CAUSES.values(), ids=NAN_CAUSES)
def test_what_comes_before_a_nan_decides_between_its_causes(
    tmp_path: Path, losses: list[float], causes: list[str]
) -> None:
    """Source 003's column "How to identify"; a finished curve knows how often it came."""
    run, trace = Run(tmp_path), Trace()
    for step, loss in enumerate(losses, 1):
        run.step(15.0, loss)
        trace["loss"].add(step, loss)
    found = run.of("loss_nan")
    assert [c in event.fields["cause"] for c, event in zip(causes, found, strict=True)] == [
        True
    ] * len(causes)
    assert len({event.fields["fixes"][0] for event in found}) == len(causes)
    assert {causes[-1] in a.cause for a in judge(trace) if a.type == "nan"} == {True}


def test_a_nan_at_the_same_step_in_two_launches_is_in_the_data(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(2):
        run.number = 0
        for step in range(50):
            run.step(15.0, 3.0 if step < 49 else math.nan)
        run.launch()
    assert ["this very step" in event.fields["cause"] for event in run.of("loss_nan")] == [
        False,
        True,
    ]


@pytest.mark.parametrize("hidden", [True, False])
def test_a_nan_gradient_norm_is_nan_beside_a_loss_of_zero_and_else_a_skipped_step(
    tmp_path: Path, hidden: bool
) -> None:
    """HF Trainer shows a NaN loss as 0.0 (logging_nan_inf_filter), and the norm as it is. Under
    fp16 with a gradient scaler, an overflow skips the step and lowers the scale."""
    run = Run(tmp_path, ranks=1)
    for number, (_, loss) in zip(range(60), healthy(1), strict=False):
        bad = number >= 50
        seen = 0.0 if bad and hidden else loss
        run.step(0.3, seen, grad_norm=math.nan if bad else 1.0, allocated_bytes=None)
    assert [event.text for event in run.of("loss_nan")] == [
        "Loss is NaN or Inf at step 51"
    ] * hidden
    assert all("gradient norm of nan" in e.fields["detail"] for e in run.of("loss_nan"))
    assert run.alarms() == ["loss_nan"] * hidden


@pytest.mark.parametrize("at", [40, 120, 200])
@pytest.mark.parametrize(
    ("factor", "length", "level"), [(1.45, 1, "info"), (1.45, 2, "info"), (2.2, 2, "warning")]
)
def test_fault_spike_is_one_line_once_the_loss_is_back(
    tmp_path: Path, at: int, factor: float, length: int, level: str
) -> None:
    """A warning if it reaches 1.5 times the level."""
    run = Run(tmp_path)
    for number, (_, loss) in zip(range(300), healthy(1), strict=False):
        run.step(0.3, loss * (factor if at <= number < at + length else 1), allocated_bytes=None)
    (spike,) = run.of("loss_spike")
    assert at < spike.fields["step"] <= at + length
    assert spike.level == level
    assert set(run.alarms()) == {"loss_spike"}


def test_an_explosion_and_a_climb_are_divergence(tmp_path: Path) -> None:
    """One alarm, and not also a spike."""
    burst, climb = Run(tmp_path), Run(tmp_path)
    for number, (_, loss) in zip(range(400), healthy(1), strict=False):
        burst.step(0.3, loss * (5 if number >= 200 else 1))
        climb.step(0.3, loss * (1 + 0.004 * max(0, number - 200)))
    for run, level, at in ((burst, "critical", 206), (climb, "warning", 300)):
        assert run.alarms() == ["loss_divergence"]
        (event,) = run.of("loss_divergence")
        assert event.level == level
        assert event.fields["step"] <= at


def warnings(losses: Iterable[float]) -> list[tuple[str, int]]:
    """The live judge's warnings, with the step of each."""
    watch = LossWatch(LossSettings())
    found = [a for step, loss in enumerate(losses) for a in watch.observe(step, loss)]
    return [(a.type, a.at_step) for a in found if a.severity != "info"]


def test_a_run_that_gets_more_unstable_is_not_taken_for_how_it_behaves() -> None:
    """Three spikes make the next ones remarks; with SGD's rate at 150 each was higher."""
    spikes = {40: 2.1, 46: 2.6, 52: 2.6, 58: 3.1, 64: 9.9, 70: 15.3}
    found = warnings(spikes.get(n, 0.7 + 0.01 * (n % 3)) for n in range(90))
    assert ("spike", 64) in found
    assert ("spike", 58) not in found


@pytest.mark.parametrize(("start", "alarm"), [(0.0, False), (1e-8, False), (2.3, True)])
def test_a_loss_that_began_at_zero_may_rise(start: float, alarm: bool) -> None:
    """GRPO's loss is the distance from the reference model. It was CRITICAL after 100 steps."""
    chance = random.Random(4)
    rise = [0.002 * chance.uniform(0.7, 1.3) * (1 if n < 60 else 6) for n in range(200)]
    assert bool(warnings([start, *(start + x * (1000 if alarm else 1) for x in rise)])) == alarm


@pytest.mark.parametrize("at", range(200, 215))
def test_an_explosion_between_two_levels_is_not_reported_again(at: int) -> None:
    """A level measured across the explosion once made it look as if the loss had come back."""
    chance = random.Random(at)
    losses = [(3 + 3 / (1 + step / 80)) * chance.gauss(1, 0.01) for step in range(600)]
    found = warnings(loss * (10 if step >= at else 1) for step, loss in enumerate(losses))
    assert [kind for kind, _ in found] == ["divergence"]


@pytest.mark.parametrize("height", [0.2, 0.25, 0.3])
def test_the_first_epochs_end_is_not_a_spike(height: float) -> None:
    """A loss that falls within each epoch jumps back up at the end, and needs the next epoch to
    fall again."""
    chance = random.Random(3)
    levels = ((3 + 3 / (1 + n / 80)) * (1 + height * (1 - n % 120 / 120)) for n in range(1000))
    assert warnings(level * chance.gauss(1, 0.01) for level in levels) == []


def test_an_explosion_in_the_first_steps_is_reported_before_the_level_is_known() -> None:
    """Five losses do not establish a level; the judge once took the sixth and similar losses for
    one."""
    losses = [0.43, 0.48, 0.26, 0.27, 0.23, 3.6, 8.5, 5.3, 322.0, 21.9, 131.0]
    assert warnings(losses) == [("divergence", 9)]


@pytest.mark.parametrize("factor", [1.6, 6.0])
def test_a_loss_that_stays_above_its_level_without_exploding_is_reported_within_five_steps(
    tmp_path: Path, factor: float
) -> None:
    """Otherwise the warning would come only after the loss had fallen back."""
    run = Run(tmp_path)
    for number, (_, loss) in zip(range(208), healthy(1), strict=False):
        run.step(0.3, loss * (factor if number >= 200 else 1), allocated_bytes=None)
    found = [*run.of("loss_spike"), *run.of("loss_divergence")]
    assert sum(f.level != "info" for f in found) == 1


@pytest.mark.parametrize("stride", [1, 50, 118])
def test_a_plateau_is_measured_in_steps_however_rarely_the_trainer_logs(stride: int) -> None:
    """Counting values instead of steps made a plateau of 4,000 steps look 40 long in a log of every
    118th step."""
    watch, chance = LossWatch(LossSettings()), random.Random(stride)
    steps = range(stride, 6000, stride)
    found = [anomaly for step in steps for anomaly in watch.observe(step, chance.gauss(7.6, 0.04))]
    assert [anomaly.type for anomaly in found] == ["plateau_high"]
    assert 1000 <= found[0].evidence["window"] <= found[0].at_step <= 4000


@pytest.mark.parametrize(
    ("curve", "found"),
    [
        (lambda n: 3.67 + 0.001 * (n % 3), True),
        (lambda n: 3.0 - 0.002 * n, False),
        (lambda n: 1.0 + 2.0 * 0.7**n, False),
        (lambda n: 1.4 + 0.2 * (n * 7 % 5), False),
        # The warm-up of an untrained language model.
        (lambda n: 10.8 + 0.001 * (n % 3), False),
    ],
    ids=["flat", "falls", "fell", "noisy", "untrained"],
)
def test_a_loss_that_is_flat_from_the_first_step_is_remarked_on_early(
    curve: Callable[[int], float], found: bool
) -> None:
    """A run that logged every 24th step ended before `plateau_steps`; a resumed one is flat too."""
    live, resumed = LossWatch(LossSettings()), LossWatch(LossSettings())
    seen = [a for n in range(40) for a in live.observe(24 * n + 24, curve(n))]
    assert [(a.type, a.severity) for a in seen] == [("plateau_high", "info")] * found
    assert not [a for n in range(40) for a in resumed.observe(24 * n + 9024, curve(n))]


def test_memory_leak_is_found_and_one_legitimate_allocation_is_not() -> None:
    leak, jump = MemoryWatch(), MemoryWatch()
    source = random.Random(2)
    leaks = [
        a for s in range(800) if (a := leak.observe(s, 18 + 0.005 * s + source.random() * 0.2))
    ]
    jumps = [
        a for s in range(2000) if (a := jump.observe(s, 18 + (s > 700) + source.random() * 0.2))
    ]
    assert [a.type for a in leaks] == ["memory_leak", "memory_leak"]
    assert leaks[0].at_step == 399
    assert jumps == []


def test_overfit_needs_a_gap_and_falling_training_loss() -> None:
    ten_epochs = [2.5, 2.1, 1.95, 2.0, 2.1, 2.2, 2.3, 2.45, 2.6, 2.7]
    rising = [2 + 0.02 * abs(n - 8) for n in range(30)]
    flat = [max(2.0, 2.6 - 0.1 * n) for n in range(30)]
    for evaluations, fall, expected in (
        (ten_epochs, 0.25, [(6, 2)]),
        (rising, 0.05, [(16, 8)]),
        (rising, 0.0, []),
        (flat, 0.05, []),
    ):
        over = OverfitWatch()
        found = [a for n, e in enumerate(evaluations) if (a := over.observe(n, e, 2.6 - fall * n))]
        assert [(a.at_step, a.evidence["best_step"]) for a in found] == expected


@pytest.mark.parametrize(
    "line",
    ["INFO | Validation Loss: {:.4f} (best so far)\n", "{{'eval_loss': {}, 'epoch': 1.0}}\n"],
)
def test_overfitting_is_seen_in_the_miners_own_lines_even_where_they_are_cut(
    tmp_path: Path, line: str
) -> None:
    run = Run(tmp_path)
    for number, (_, loss) in zip(range(600), healthy(1), strict=False):
        run.step(0.3, loss)
        if number % 20 == 19:
            text = line.format(3.0 + 0.01 * abs(number // 20 - 8)).encode()
            run.output(text[:17])
            run.output(text[17:])
    assert run.alarms() == ["overfit"]
    assert run.of("overfit")[0].fields["evidence"]["best_step"] == 180


def test_evaluation_in_the_step_records_shows_overfitting(tmp_path: Path) -> None:
    """The flight record must carry the evaluation loss: without it the judge can't detect
    overfitting."""
    run = Run(tmp_path)
    source = random.Random(2)
    for number, (_, loss) in zip(range(1, 1200), healthy(1), strict=False):
        if number % 20:
            run.step(0.3, loss)
            continue
        evaluated = (3.0 + 0.02 * abs(number // 20 - 20)) * source.gauss(1, 0.003)
        run.output(b"the same, printed before the step ends: val_loss=%.3f\n" % evaluated)
        run.step(0.3, loss, eval_loss=evaluated)
    assert run.alarms() == ["overfit"]
    event = run.of("overfit")[0]
    assert 340 <= event.fields["evidence"]["best_step"] <= 460
    assert event.fields["step"] <= 640
    assert [f.fields["eval_loss"] is not None for f in run.of("inner_step")].count(
        True
    ) == 1199 // 20


@pytest.mark.parametrize("printed", [True, False])
def test_an_evaluation_that_is_not_a_number_is_reported_once_until_it_is_one_again(
    tmp_path: Path, printed: bool
) -> None:
    """An evaluation must not stay NaN for a week, stored at each step, without anybody being
    told."""
    run = Run(tmp_path, ranks=1)
    for number, (_, loss) in zip(range(1, 200), healthy(1), strict=False):
        evaluated = (
            None if number % 20 else math.nan if number in (60, 80, 160) else 3.0 - number / 1e3
        )
        run.step(0.3, loss, eval_loss=None if printed else evaluated)
        if printed and evaluated is not None:
            run.output(b"step %d val_loss: %.3f\n" % (number, evaluated))
    assert run.alarms() == ["loss_divergence"] * 2
    event = run.of("loss_divergence")[0]
    assert event.text == "EVALUATION LOSS is nan at step 60"
    assert (event.level, event.rank) == ("warning", 0)
    assert any("labels are all masked" in fix for fix in event.fields["fixes"])


@pytest.mark.parametrize("noise", [0.005, 0.02, 0.05])
def test_a_noisy_evaluation_that_goes_nowhere_is_not_overfitting(noise: float) -> None:
    """The best of many noisy evaluations is low by chance, so it must not be the yardstick."""
    alarms = 0
    for seed in range(50):
        source, watch = random.Random(seed), OverfitWatch()
        for n in range(100):
            flat = max(2.2, 1.7 + 4 * (n + 1) ** -0.8) * source.gauss(1, noise)
            alarms += watch.observe(200 * n, flat, 1.5 + 4 * (n + 1) ** -0.4) is not None
    assert alarms <= 1, "in a million steps"


@pytest.mark.parametrize(("level", "severity"), [(10.8, "warning"), (2.3, "info")])
@pytest.mark.parametrize("noise", [0.005, 0.02])
def test_a_loss_that_never_falls_is_found_by_both_judges(
    level: float, severity: str, noise: float
) -> None:
    """The live judge only remarks on it, since a resumed run may have nothing left to learn, but
    raises an alarm if the level is that of an untrained language model."""
    live: list[list[str]] = []
    after: list[list[str]] = []
    for seed in range(10):
        source, watch = random.Random(seed), LossWatch(LossSettings())
        curve = [level * source.gauss(1, noise) for _ in range(1500)]
        live.append([a.severity for s, x in enumerate(curve) for a in watch.observe(s, x)])
        trace = Trace()
        for step, value in enumerate(curve):
            trace["loss"].add(step, value)
        after.append([a.type for a in judge(trace)])
    assert sum(severity in found for found in live) >= 9
    assert sum("plateau_high" in found for found in after) >= 9


@pytest.mark.parametrize(
    ("start", "falls", "words"),
    [
        (8.0, 6.0, ["converged"]),
        (2.05, 0.05, ["decreasing, but slowly", "below its first level"]),
        # A fall of 2 % in 1,500 steps passed in silence.
        (2.45, 0.00003, ["decreasing, but slowly"]),
        (10.9, 0.0002, ["decreasing, but slowly"]),
    ],
)
def test_convergence_plateau_and_a_slow_fall_have_different_words(
    start: float, falls: float, words: list[str]
) -> None:
    """Remarks, but a warning where the loss is still that of an untrained language model."""
    source, watch = random.Random(4), LossWatch(LossSettings())
    found = []
    for step in range(1500 if falls < 0.01 else 4000):
        level = start - (falls * step if falls < 0.01 else falls * (1 - math.exp(-step / 100)))
        found += watch.observe(step, level * source.gauss(1, 0.01))
    assert {a.severity for a in found} == {"warning" if start > 10 else "info"}
    assert [word in a.detail for word, a in zip(words, found, strict=True)] == [True] * len(words)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=200))
def test_no_loss_makes_the_judge_raise(values: list[float]) -> None:
    watch = LossWatch(LossSettings())
    for step, value in enumerate(values):
        list(watch.observe(step, value))


def test_settings_of_the_run_are_in_the_fixes(tmp_path: Path) -> None:
    run = Run(tmp_path, replace(Config(), miner=MinerSettings(effective_batch_size=512)))
    run.step(15.0, 9.0)
    run.step(15.0, math.inf)
    assert "halve the learning rate, from 0.0002 to 0.0001" in run.of("loss_nan")[0].fields["fixes"]


def test_after_a_new_rendezvous_the_losses_of_the_current_ranks_are_judged(tmp_path: Path) -> None:
    """Otherwise no detector would judge the losses on a node whose leading rank moved to another
    node."""
    run, losses = Run(tmp_path), [loss for _, (_, loss) in zip(range(60), healthy(1), strict=False)]
    for loss in losses:
        run.step(15.0, loss)
    run.step(15.0, math.nan)
    run.renumber(4, 5)
    for loss in [*losses[-20:], math.nan]:
        run.step(15.0, loss)
    for _ in range(6):
        run.step(15.0, 1e4)
    nan = [event.fields["detail"] for event in run.of("loss_nan")]
    assert [words.partition(":")[0] for words in nan] == ["ranks 0,1", "ranks 4,5"]
    assert [event.fields["detail"][:9] for event in run.of("loss_divergence")] == ["ranks 4,5"]


def test_the_rank_whose_loss_was_nan_first_is_named(tmp_path: Path) -> None:
    """Rank 0's steps arrive first; its loss follows one step later, through the gradients."""
    run = Run(tmp_path)
    for _ in range(5):
        run.step(15.0, 2.0)
    # Both ranks' steps arrive between two ticks, rank 0's before rank 1's.
    curves = run.monitors[1]
    records = {
        rank: [
            StepRecord(inner_step=n, total_steps=n, loss=math.nan if n + rank >= 7 else 2.0)
            for n in (6, 7)
        ]
        for rank in (0, 1)
    }
    found = [event for rank in (0, 1) for event in curves.on_steps(rank, records[rank])]
    assert found == []
    assert curves.objection() == "loss_nan"
    found = list(curves.on_tick(run.clock.monotonic(), {}))
    assert [(f.name, f.rank, f.fields["step"]) for f in found] == [("loss_nan", 1, 6)]
    assert curves.objection() is None


def test_the_first_rank_that_reports_is_not_judged_alone(tmp_path: Path) -> None:
    """Of a fast run under Fabric, rank 0's NaN of step 14 was named: rank 1's of step 13 came in
    the same second."""
    run = Run(tmp_path, ranks=2)
    curves = run.monitors[1]
    for rank, bad in ((0, 14), (1, 13)):
        steps = [StepRecord(total_steps=n, loss=math.nan if n >= bad else 2.0) for n in range(20)]
        assert list(curves.on_steps(rank, steps)) == []
    found = list(curves.on_tick(run.clock.monotonic(), {}))
    assert [(f.name, f.rank, f.fields["step"]) for f in found] == [("loss_nan", 1, 13)]


SHOWN: dict[str, tuple[dict[str, Any], int, str]] = {
    "spike": ({"loss": 9.0}, 2, "loss_spike"),
    "explosion": ({"loss": 90.0}, 20, "loss_divergence"),
    "nan": ({"loss": math.nan}, 20, "loss_nan"),
    "eval": ({"eval_loss": math.nan}, 20, "loss_divergence"),
}


@pytest.mark.parametrize(("change", "steps", "name"), SHOWN.values(), ids=SHOWN)
@pytest.mark.parametrize("ranks", [(2,), range(4)], ids=["one rank", "all ranks"])
def test_what_ranks_show_alike_is_one_line_that_names_them(
    tmp_path: Path, change: dict[str, Any], steps: int, name: str, ranks: Sequence[int]
) -> None:
    """Spikes were judged on rank 0 alone, and one drop of memory gave four identical lines."""
    run = Run(tmp_path, ranks=4)
    for number in range(140):
        bad = 100 <= number < 100 + steps
        run.step(15.0, 2.0 - 0.001 * number, {rank: change for rank in ranks if bad})
    assert run.alarms() == [name]
    (event,) = run.of(name)
    assert event.rank == (2 if len(ranks) == 1 else None)
    assert ("ranks 0-3" in event.text) == (len(ranks) > 1)
