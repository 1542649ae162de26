"""Ranks compared: the straggler, a model that is not on its GPU, other explanations for slow steps,
ranks that end while others train, and other nodes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miner_guard.config import Config, GpuSettings, StepSettings
from miner_guard.rank.layout import FLAG_LOSS_ON_CPU, Now, StepRecord
from miner_guard.record.status_document import GpusStatus
from miner_guard.watch import ranks as module
from miner_guard.watch.progress import TrainingFacts
from miner_guard.watch.ranks import (
    RanksMonitor,
    by_arrivals,
    by_phases,
    ended_early,
    explain,
    left_behind,
)
from miner_guard.watch.step_times import work_seconds
from tests.support.contexts import JobsAtOnce, context
from tests.support.simulated_ranks import GIB, Run, healthy

REST = {"backward": 0.01, "optimizer": 0.01}
ALIKE = {"data": 0.01, "backward": 0.1}


@pytest.mark.parametrize(
    ("seconds", "phases", "detail"),
    [
        # Under DDP the fast rank waits in its backward pass, while the slow one is in no phase.
        (
            (0.92, 0.92),
            ({"backward": 0.60, "optimizer": 0.01}, {"backward": 0.05, "optimizer": 0.01}),
            "is busy longer than the others by 60% of a 0.92s step (over 20 steps: it waits "
            "0.05s in collectives, the others wait 0.60s); slow in no named phase: 0.86s, "
            "others 0.31s",
        ),
        # Under `--attach auto`, FSDP2's gathers in the forward pass belong to no phase, and the
        # program waits for a GPU where it reads the loss. The time outside phases is not only
        # waiting, so no wait is given.
        (
            (0.34, 0.34),
            ({"data": 0.12, **REST}, {"data": 0.30, **REST}),
            "is busy longer than the others by 53% of a 0.34s step (over 20 steps); "
            "slow in data: 0.30s, others 0.12s",
        ),
        # A rank that waits least must not be named if nothing shows that it was working.
        ((0.9, 0.4), (ALIKE, ALIKE), None),
        # Local SGD: most steps wait for nobody, so the usual wait is 0.
        (
            (0.05, 0.30),
            ({"data": 0.04}, {"data": 0.29}),
            "is busy longer than the others by 83% of a 0.30s step (over 20 steps, in which the "
            "ranks do not wait for each other); slow in data: 0.29s, others 0.04s",
        ),
        # Gathers in the forward pass hide no slow data loader.
        (
            (9.0, 9.0),
            ({"data": 0.1, "forward": 8.0}, {"data": 4.1, "forward": 4.0}),
            "is busy longer than the others by 44% of a 9.00s step (over 20 steps: it waits "
            "4.00s in collectives, the others wait 8.00s); slow in data: 4.10s, others 0.10s",
        ),
        # The fastest rank is no straggler.
        (
            (9.0, 9.0),
            ({"forward": 3.0, "collective": 6.0}, {"forward": 9.0}),
            "is busy longer than the others by 67% of a 9.00s step (over 20 steps: it waits "
            "0.00s in collectives, the others wait 6.00s); slow in forward: 9.00s, others 3.00s",
        ),
    ],
)
def test_the_rank_that_works_longer_is_the_straggler(
    seconds: Sequence[float], phases: Sequence[Mapping[str, float]], detail: str | None
) -> None:
    found = by_phases({r: [StepRecord(end=seconds[r], phases=phases[r])] * 20 for r in (0, 1)})
    assert (None if found is None else found.detail()) == detail
    assert found is None or found.rank == 1


def test_a_rank_that_computes_longer_is_named_under_a_per_step_all_reduce(tmp_path: Path) -> None:
    """The others wait outside all phases, where the miner averages the loss of each step."""
    run = Run(tmp_path, ranks=4)
    quick, slow = {"forward": 0.1, "backward": 0.2}, {"forward": 0.5, "backward": 1.0}
    for _ in range(60):
        run.step(1.6, 3.0, {r: {"phases": slow if r == 2 else quick} for r in range(4)})
    assert {event.rank for event in run.of("straggler")} == {2}


def test_a_straggler_is_named_by_waiting_and_cleared_although_all_steps_take_equally_long(
    tmp_path: Path,
) -> None:
    run, source = Run(tmp_path, ranks=4), random.Random(5)
    for number in range(200):
        late = 3.0 if 60 <= number < 140 else 0.0
        rows = {
            rank: {
                "phases": {
                    "data": 0.3 + (late if rank == 2 else 0),
                    "forward": 5.0 * source.gauss(1, 0.02),
                    "collective": max(0.0, source.gauss(1, 0.1) + (0 if rank == 2 else late)),
                }
            }
            for rank in range(4)
        }
        run.step(15.0 + late, 3.0 - number / 100, rows)
    *named, cleared = run.of("straggler")
    assert 2 <= len(named) <= 4
    assert {(event.rank, event.fields["phase"]) for event in named} == {(2, "data")}
    assert (cleared.rank, cleared.level) == (2, "info")
    assert cleared.text.startswith("STRAGGLER CLEARED: rank 2 after ")
    assert set(run.alarms()) == {"straggler"}


def test_after_a_new_rendezvous_the_present_ranks_are_compared(tmp_path: Path) -> None:
    """Otherwise the guard would wait for a rank that has gone to another node, and never name or
    clear a straggler."""
    run = Run(tmp_path, ranks=2)
    for ranks, culprit in (((0, 1), 1), ((4, 5), 4)):
        run.renumber(*ranks)
        for _ in range(60):
            slow, waits = {"data": 3.5, "collective": 0.1}, {"collective": 3.6}
            run.step(15.0, 3.0, {r: {"phases": slow if r == culprit else waits} for r in ranks})
        assert run.of("straggler")[-1].rank == culprit
    assert [event.rank for event in run.of("straggler") if event.level == "info"] == [1]


def entered(ranks: int, late: int | None, count: int = 60) -> dict[int, list[dict[str, Any]]]:
    """Three collectives a step of 0.3 s: the late rank enters the first of each 0.25 s after the
    others."""
    chance = random.Random(3)

    def at(rank: int, number: int) -> int:
        step_s, place = 0.3 * (number // 3), number % 3
        delay = 0.25 if rank == late or place else 0.0
        return int(1e9 * (1.8e9 + step_s + delay + 0.01 * place + 0.002 * chance.random()))

    common = {"process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce"}
    return {
        rank: [
            {**common, "collective_seq_id": n, "time_created_ns": at(rank, n)} for n in range(count)
        ]
        for rank in range(ranks)
    }


@pytest.mark.parametrize(
    "traces",
    [
        entered(4, late=None),
        entered(1, late=0),
        entered(2, late=1, count=9),
        # The CPU of one rank is late, but those of the others are steps ahead of their GPUs.
        {
            rank: [
                {**e, "time_created_ns": n * 3 * 10**8 + rank * 10**9} for n, e in enumerate(each)
            ]
            for rank, each in entered(2, late=None).items()
        },
        {0: [], 1: []},
        # An older torch records no times.
        {r: [{"collective_seq_id": 1, "process_group": "0"}] for r in (0, 1)},
    ],
)
def test_level_arrivals_and_too_few_name_nobody(traces: Any) -> None:
    assert by_arrivals(traces, 0.3) is None


def test_a_rank_that_is_slow_in_no_phase_is_named_by_its_arrivals_although_all_step_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank five times slower under a per-step `all_reduce(loss)` was never named: its work and
    the others' wait are in no phase."""
    late: list[int | None] = [1]
    monkeypatch.setattr(
        module, "collectives", lambda _state, _records, ranks: entered(len(ranks), late[0])
    )
    run = Run(tmp_path, ranks=3, jobs=JobsAtOnce())
    for number in range(400):
        run.step(0.3, 3.0 - number / 400, phases={"data": 0.01})
    named = run.of("straggler")
    assert {event.rank for event in named} == {1}
    levels = [event.level for event in named]
    assert levels == ["critical", *["debug"] * (len(named) - 1)], "one line per cause"
    assert (
        "is busy longer than the others by 87% of a 0.30s step "
        "(it enters 20 of 60 collectives 0.25s after the others)"
    ) in named[0].text
    late[0] = None
    for number in range(400):
        run.step(0.3, 2.0 - number / 400, phases={"data": 0.01})
    assert (run.of("straggler")[-1].rank, run.of("straggler")[-1].level) == (1, "info")
    assert set(run.alarms()) == {"straggler"}


def test_each_ranks_own_time_is_without_its_wait() -> None:
    """`status` must not show two ranks at 0.92 s when one of them only waits."""
    phases = {0: {"backward": 0.60}, 1: {"backward": 0.05}, 2: {}}
    steps = {rank: StepRecord(end=0.92, phases=each) for rank, each in phases.items()}
    assert work_seconds(steps) == pytest.approx({0: 0.32, 1: 0.87, 2: 0.92})
    assert work_seconds({}) == {}


TWO_GPUS = replace(Config(), gpu=GpuSettings(expect=2))
ON_CPU = {"allocated_bytes": 0.05 * GIB, "flags": FLAG_LOSS_ON_CPU}


@pytest.mark.parametrize(
    ("expect", "device", "changes", "count"),
    [
        # A loss that is copied to the CPU by a rank that holds GPU memory.
        (2, None, {"flags": FLAG_LOSS_ON_CPU}, 0),
        # A model that was moved after its diagnosis, or is small.
        (2, "cpu", {"allocated_bytes": 18 * GIB}, 0),
        (2, "cuda:0", {"allocated_bytes": 0.4 * GIB, "flags": FLAG_LOSS_ON_CPU}, 0),
        (2, "cuda:0", {}, 0),
        (2, None, ON_CPU, 1),
        (2, "cpu", {"allocated_bytes": None}, 1),
        # The CPU was asked for, or nothing was.
        (0, "cpu", {"allocated_bytes": None}, 0),
        ("auto", "cpu", {"allocated_bytes": None}, 0),
    ],
)
def test_a_fallback_is_certain_where_memory_is_low_and_a_gpu_was_expected(
    tmp_path: Path, expect: Any, device: str | None, changes: dict[str, Any], count: int
) -> None:
    run = Run(tmp_path, replace(Config(), gpu=GpuSettings(expect=expect)))
    if device is not None:
        reports = [{"rank": r, "model_device": device, "offload": False} for r in range(2)]
        run.entry(kind="diagnosis", t=1.0, reports=reports)
    for _ in range(20):
        run.step(0.3, 3.0, **changes)
    found = [(e.level, e.fields["which"], e.fields["verdict"]) for e in run.of("cpu_fallback")]
    assert found == [("critical", "ranks 0,1", "certain")] * count
    assert run.alarms() == ["cpu_fallback"] * count


def test_the_rank_on_the_cpu_is_named_with_the_evidence(tmp_path: Path) -> None:
    run = Run(tmp_path, TWO_GPUS)
    for _ in range(5):
        run.step(15.0, 3.0, {1: ON_CPU})
    (event,) = run.of("cpu_fallback")
    assert event.rank == 1
    assert "0.05 GB" in event.text


def test_low_memory_and_slow_steps_are_suspected_then_cleared(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(6):
        run.step(245.7, 3.4, allocated_bytes=0.05 * GIB)
    for _ in range(12):
        run.step(15.0, 3.4)
    verdicts = [(e.fields["verdict"], e.level) for e in run.of("cpu_fallback")]
    assert verdicts == [("suspected", "warning"), ("cleared", "info")]
    assert len(run.of("slow_step")) == 5


def test_what_cleared_before_it_was_reported_is_not_reported(tmp_path: Path) -> None:
    """`CPU FALLBACK … cleared` must not appear without a `CPU FALLBACK` before it."""
    monitor = RanksMonitor(context(tmp_path, config=TWO_GPUS))
    steps = [StepRecord(**(ON_CPU if n == 1 else {"allocated_bytes": 18 * GIB})) for n in range(9)]
    list(monitor.on_steps(1, steps[:2]))
    assert list(monitor.on_tick(100.0, {})) == []
    list(monitor.on_steps(1, steps[2:]))
    assert list(monitor.on_tick(104.0, {})) == []


GPU = {
    "state": "ok",
    "utilization_ratio": 0.0,
    "memory_used_bytes": 0.1 * GIB,
    "throttle": ["idle"],
}


@pytest.mark.parametrize(
    ("changes", "event", "words"),
    [
        ({}, "cpu_fallback", "NVML shows no GPU in use: 1 GPU, at most 0% busy"),
        (
            {"utilization_ratio": 1.0, "throttle": ["HW thermal"]},
            "slow_step",
            "HW thermal on 1 GPU",
        ),
    ],
)
def test_gpus_that_nvml_shows_unused_are_evidence_and_throttling_explains(
    tmp_path: Path, changes: dict[str, Any], event: str, words: str
) -> None:
    run = Run(tmp_path, ranks=1)
    run.status["health"] = {"gpus": {"state": "ok", "gpus": [{**GPU, **changes}]}}
    for _ in range(8):
        run.step(120.0, 3.0, allocated_bytes=None)
    assert any(words in each.text for each in run.of(event))
    assert set(run.alarms()) == {"slow_step", event}


def test_waiting_for_data_is_not_called_cpu_fallback(tmp_path: Path) -> None:
    """The line names the rank that waits for data, not one that waits for that rank."""
    run = Run(tmp_path)
    for number, (_, loss) in zip(range(80), healthy(1), strict=False):
        seconds = 15.0 if number < 40 else 100.0
        waits = {"phases": {"collective": seconds - 14}}
        run.step(seconds, loss, {0: waits}, phases={"data": seconds - 14})
    assert not run.of("cpu_fallback")
    assert [(e.rank, e.fields["cause"]) for e in run.of("slow_step") if "cause" in e.fields] == [
        (1, "starved by data")
    ]


@pytest.mark.parametrize(
    ("phases", "throttle", "cause"),
    [
        ({"forward": 40, "backward": 70}, [], "accumulation too high"),
        ({}, ["sw_thermal_slowdown"], "GPU throttled"),
        ({"collective": 90}, [], "waiting in collectives"),
    ],
)
def test_source_004s_problem_2_is_explained_with_its_arithmetic(
    phases: dict[str, float], throttle: list[str], cause: str
) -> None:
    facts = TrainingFacts(batch_size=2, effective_batch_size=512, accumulation_steps=256)
    sample = GpusStatus("ok", gpus=[{**GPU, "throttle": throttle}])
    found = explain(120.0, phases, facts, StepSettings(), sample=sample)
    assert found is not None
    assert found[0] == cause
    assert cause != "accumulation too high" or found[1] == (
        "256 accumulation steps x 469 ms = 120s; 20s would fit 42 (effective batch 84)"
    )


def rank(state: str, heartbeat: float = 100.0, steps: int = 15) -> Now:
    unknown = (None, None, None, None)
    return Now(state, "", heartbeat, heartbeat, None, steps, steps, *unknown, steps)


@pytest.mark.parametrize(
    ("ranks", "gone", "detail"),
    [
        # Not `nccl_network_error on rank 0`: rank 1 has left the loop.
        (
            (rank("failed", 103.0), rank("ended", 100.0)),
            None,
            "rank 1 ended with code 0 at step 15, before rank 0",
        ),
        ((rank("failed", 100.0), rank("ended", 103.0)), None, None),
        ((rank("ended"), rank("ended")), None, None),
        ((rank("running"), rank("running")), None, None),
        ((rank("failed", 100.0), rank("running", 99.0)), None, None),
        # Its process is gone while the launcher lives.
        (
            (rank("running"), rank("running"), rank("running")),
            {1},
            "rank 1 died at step 15 (killed, or ended by os._exit), before ranks 0,2",
        ),
        (
            (rank("running"), rank("failed"), rank("running")),
            {1},
            "rank 1 ended with an exception at step 15, before ranks 0,2",
        ),
        (
            (rank("running"), rank("starting", steps=0)),
            {1},
            "rank 1 died before its first step (killed, or ended by os._exit), before rank 0",
        ),
        # All have ended: the launcher will.
        ((rank("running"), rank("running")), {0, 1}, None),
    ],
)
def test_a_rank_that_ends_before_the_others_is_named_with_its_end(
    ranks: Sequence[Now], gone: set[int] | None, detail: str | None
) -> None:
    headers = dict(enumerate(ranks))
    ended = ended_early(headers) if gone is None else left_behind(headers, gone)
    assert ended == (None if detail is None else ([1], detail))
