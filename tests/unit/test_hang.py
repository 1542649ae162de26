"""Lack of progress: when it is a hang, when it is not, and which rank is holding up the others."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miner_guard.config import HangSettings
from miner_guard.rank.layout import Identity, Now
from miner_guard.rank.phases import Phases
from miner_guard.record.words import rank_list
from miner_guard.system.processes import Process
from miner_guard.watch.evidence import Subject
from miner_guard.watch.hang import (
    GONE_S,
    NOTHING_KNOWN,
    Hang,
    HangDetector,
    Processes,
    describe,
    elsewhere,
    name_culprits,
)

SETTINGS = HangSettings(min_s=300.0, first_step_s=1800.0)


def rank(phase: str = "", since: float = 0.0, steps: int = 10, **more: Any) -> Now:
    beat = more.pop("heartbeat", since)
    unknown = (None, None, None, None)
    now = Now("running", phase, since, beat, 1, steps, steps, *unknown, steps)
    return replace(now, **more)


def operating(since: float) -> Now:
    return rank(since=since, heartbeat=100.0, operation="evolution", operation_since=since)


def watch(
    detector: HangDetector,
    start: float,
    ranks: dict[int, Now],
    processes: Processes = NOTHING_KNOWN,
    end: float = 5000.0,
) -> tuple[float, Hang]:
    """Check once a second until `end`; returns the time and the hang."""
    now = start
    while now <= end:
        hang = detector.check(now, ranks, processes)
        if hang is not None:
            return now, hang
        now += 1.0
    return math.inf, Hang((), "", 0.0, 0.0)


@pytest.fixture
def detector() -> HangDetector:
    """A detector launched at 0, with one step of 10 s that ended at 100."""
    detector = HangDetector(SETTINGS)
    detector.launched(0.0)
    detector.stepped(100.0, 10.0)
    return detector


def test_the_rank_outside_the_collective_is_named(detector: HangDetector) -> None:
    ranks = {n: rank("allreduce", 101.0, allowance_s=0.0) for n in (0, 1, 3)}
    when, hang = watch(detector, 101.0, {**ranks, 2: rank("data", 100.0)})
    assert when == pytest.approx(400.0, abs=2)
    assert hang.culprits == (2,)
    assert hang.detail == f"rank 2 in data for {when - 100:.0f}s, ranks 0,1,3 waiting in allreduce"


@pytest.mark.parametrize(
    ("header", "at"),
    [
        (rank("forward", 101.0), 400.0),
        *((rank(name, 110.0), 1910.0) for name in ("upload", "load_state", "val_loss", "monitor")),
        (rank("checkpoint", 110.0), 1910.0),
        (rank("allreduce", 110.0), 950.0),
        (rank("compile", 101.0, allowance_s=3600.0), 3701.0),
        # Source 000's incident: an evaluation of minutes inside `track()` was killed as a hang.
        (operating(110.0), 1910.0),
        (replace(operating(110.0), phase="data"), 1910.0),
    ],
)
def test_what_has_an_allowance_may_take_it_and_no_more(
    detector: HangDetector, header: Now, at: float
) -> None:
    when, hang = watch(detector, 111.0, {0: header, 1: rank("collective", 110.0)})
    assert when == pytest.approx(at, abs=2)
    assert hang.culprits == (0,) or header.phase == "allreduce"


@pytest.mark.parametrize("long", [rank("upload", 101.0), operating(101.0)])
def test_after_something_long_the_usual_limit_counts_from_its_end(
    detector: HangDetector, long: Now
) -> None:
    assert watch(detector, 101.0, {0: long}, end=1000.0)[0] == math.inf
    assert watch(detector, 1001.0, {0: rank("data", 1000.5)})[0] == pytest.approx(1300.5, abs=2)


@pytest.mark.parametrize(
    ("seconds", "phases", "limit_s"),
    [(10.0, {}, 300.0), (240.0, {}, 1200.0), (600.0, {"allreduce": 590.0, "forward": 6.0}, 300.0)],
)
def test_slow_steps_stretch_the_limit_and_an_allreduce_within_a_step_does_not(
    detector: HangDetector, seconds: float, phases: dict[str, float], limit_s: float
) -> None:
    detector.stepped(700.0, seconds, phases)
    when, _ = watch(detector, 701.0, {0: rank("forward", 700.5)})
    assert when == pytest.approx(700.0 + limit_s, abs=2)


class Shown:
    """The hook's view of a rank's phases, as the detector reads it."""

    def show_phase(self, name: bytes, since: float, heartbeat: float, allowance_s: float) -> None:
        known = None if math.isnan(allowance_s) else allowance_s
        self.now = rank(name.decode(), since, allowance_s=known, heartbeat=heartbeat)


@pytest.mark.parametrize(
    ("outer", "allowance", "inner", "at"),
    [
        ("val_loss", None, None, 1901.0),
        ("search", 400.0, None, 501.0),
        # Short phases that declare an allowance again and again are no progress.
        (None, None, 10.0, 401.0),
    ],
)
def test_what_is_nested_in_a_long_phase_has_its_time_and_no_more(
    detector: HangDetector,
    outer: str | None,
    allowance: float | None,
    inner: float | None,
    at: float,
) -> None:
    """Validation fetches data and runs forward passes, over and over."""
    now, shown = 101.0, Shown()
    phases = Phases(shown, lambda: now, SETTINGS.allowances)
    if outer is not None:
        phases.named(outer, allowance).__enter__()
    while now < 3000.0:
        with phases.named("data", inner):
            now += 5.0
            if detector.check(now, {0: shown.now}) is not None:
                break
    assert now == pytest.approx(at, abs=11)


def test_a_suspended_machine_is_not_a_hang(detector: HangDetector) -> None:
    ranks = {0: rank("forward", 100.0)}
    assert watch(detector, 101.0, ranks, end=200.0)[0] == math.inf
    # No check for an hour means that this process did not run, so it knows nothing about the miner.
    assert detector.check(3800.0, ranks) is None
    assert watch(detector, 3801.0, ranks)[0] == pytest.approx(4000.0, abs=2)


def test_a_hang_is_reported_once_and_a_second_one_like_the_first(detector: HangDetector) -> None:
    ranks = {0: rank("forward", 100.0)}
    assert watch(detector, 101.0, ranks)[0] == pytest.approx(400.0, abs=2)
    assert watch(detector, 401.0, ranks, end=2000.0)[0] == math.inf
    detector.stepped(2000.0, 10.0)
    assert watch(detector, 2001.0, ranks)[0] == pytest.approx(2300.0, abs=2)


@pytest.mark.parametrize(("state", "finished"), [("finished", True), ("closed", False)])
def test_a_process_that_outlives_its_training_is_a_hang_after_torchruns_exit_barrier(
    detector: HangDetector, state: str, finished: bool
) -> None:
    """A node that is done first, or whose peer is lost, waits there for 300 s by default."""
    when, hang = watch(detector, 152.0, {n: rank(state=state, heartbeat=150.0) for n in (0, 1)})
    assert 150.0 + 300.0 + 10.0 < when < 600.0
    assert "is still running" in hang.detail
    assert hang.finished is finished


@pytest.mark.parametrize(
    ("ranks", "culprits"),
    [
        ({0: rank("backward", steps=9), 1: rank("data", steps=10)}, (0,)),
        ({0: rank("val_loss"), 1: rank("allreduce"), 2: rank("allreduce")}, (0,)),
        ({0: rank("backward"), 1: rank("forward"), 2: rank("backward")}, (1,)),
        ({0: rank("allreduce"), 1: rank("allreduce")}, ()),
        ({0: rank("collective"), 1: rank(state="closed")}, (1,)),
        ({0: operating(1.0), 1: rank("allreduce")}, (0,)),
    ],
)
def test_the_culprit_is_behind(ranks: dict[int, Now], culprits: tuple[int, ...]) -> None:
    assert name_culprits(ranks) == culprits


@pytest.mark.parametrize(
    ("alone", "culprits"),
    [
        *((rank(phase), (0,)) for phase in ("data", "upload")),
        (rank(state="closed"), (0,)),
        *((rank(phase), ()) for phase in ("forward", "allreduce", "")),
    ],
)
def test_a_rank_alone_on_its_node_is_blamed_only_if_it_waits_for_no_other_node(
    alone: Now, culprits: tuple[int, ...]
) -> None:
    assert name_culprits({0: alone}, Processes(elsewhere=1)) == culprits
    assert name_culprits({0: alone}, Processes(gone={0}, elsewhere=1)) == (0,)
    assert name_culprits({0: alone}) == (0,)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((2,), "rank 2"),
        ((0, 1, 3), "ranks 0,1,3"),
        ((0, 1, 2, 3, 5, 7, 8), "ranks 0-3,5,7,8"),
        (range(1024), "ranks 0-1023"),
    ],
)
def test_many_ranks_are_listed_as_ranges(ranks: Any, words: str) -> None:
    assert rank_list(ranks) == words


@pytest.mark.parametrize("count", [8, 1024])
def test_a_hang_of_many_ranks_fits_on_a_line(count: int) -> None:
    """Whole nodes hang at the same time, which must not lead to a 4 KB line."""
    half = count // 2
    ranks = {n: rank("data" if n < half else "allreduce", -float(n % 7)) for n in range(count)}
    assert describe(0.0, ranks, range(half)) == (
        f"ranks 0-{half - 1} in data for {min(half - 1, 6)}s, "
        f"ranks {half}-{count - 1} waiting in allreduce"
    )


@pytest.mark.parametrize(
    ("ranks", "processes", "at", "detail"),
    [
        (
            {0: rank("data", 101.0), 1: rank("backward", 101.0)},
            Processes(stopped={1}),
            400.0,
            "rank 1 in backward for 300s: its process is stopped (state T), rank 0 waiting in data",
        ),
        (
            {0: rank("backward", 101.0), 1: rank("backward", 101.0)},
            Processes(gone={1}),
            102.0 + GONE_S,
            "rank 1 is gone, rank 0 waiting in backward",
        ),
        (
            {0: rank(since=5.0, steps=0, state="starting")},
            Processes(absent={1}),
            400.0,
            "rank 1 has not called init(), rank 0 waiting before its first step",
        ),
    ],
)
def test_a_rank_that_is_stopped_gone_or_absent_is_named_whatever_the_others_do(
    detector: HangDetector, ranks: dict[int, Now], processes: Processes, at: float, detail: str
) -> None:
    """A rank that died is named before the usual limit: its launcher may never end the others."""
    when, hang = watch(detector, 102.0, ranks, processes)
    assert when == pytest.approx(at, abs=2)
    assert hang.culprits == (1,)
    assert hang.detail == detail


def test_a_new_rendezvous_of_torchrun_has_as_long_as_a_start(detector: HangDetector) -> None:
    """With --nnodes=1:3, a node that joined made the guard end torchrun after 45 s, because all
    ranks of its own node were gone."""
    ranks = {n: rank("allreduce", 101.0) for n in (0, 1)}
    restarting = Processes(gone={0, 1}, restarting=True)
    when, hang = watch(detector, 102.0, ranks, restarting)
    assert when == pytest.approx(100.0 + 1800.0, abs=2)
    assert hang.detail == "ranks 0,1 is gone"


@pytest.mark.parametrize(
    ("cpu_share", "prints", "at"), [(0.01, False, 1800.0), (0.9, False, None), (0.0, True, None)]
)
def test_silence_without_cpu_time_before_init_is_a_hang_and_work_is_not(
    cpu_share: float, prints: bool, at: float | None
) -> None:
    """A miner may wait for a lock before `init` forever, or tokenize for hours."""
    detector = HangDetector(SETTINGS)
    detector.launched(0.0)
    assert watch(detector, 0.0, {}, end=14.0)[0] == math.inf
    found = None
    for now in range(15, 7200):
        if now % 10 == 0:
            detector.used_cpu(now, cpu_share * now)
        if prints:
            detector.printed(now)
        if detector.check(now, {}) is not None:
            found = now
            break
    assert found == (None if at is None else pytest.approx(at, abs=12))


def test_a_late_node_is_named_where_no_rank_here_stands_out(detector: HangDetector) -> None:
    waiting = {n: rank("collective", 100.0) for n in range(2)}
    what = "a rank on node b with rank 2 did not ask in time"
    assert detector.late(160.0, waiting, 60.0, what).detail.endswith(f": {what}")
    one_is_late = {**waiting, 1: rank("data", 100.0)}
    assert what not in detector.late(160.0, one_is_late, 60.0, what).detail


@pytest.mark.parametrize(
    ("world_size", "culprits", "pointed"), [(4, (), True), (2, (), False), (4, (0,), False)]
)
def test_where_no_rank_here_stands_out_the_other_nodes_are_pointed_to(
    world_size: int, culprits: tuple[int, ...], pointed: bool
) -> None:
    """Otherwise no rank would seem to be at fault in another node's hang."""
    who = [
        Subject(Process(1, 1), Path(), n, Identity(1, n, n, world_size, 1, local_world_size=2))
        for n in range(2)
    ]
    words = elsewhere(Hang(culprits, "ranks 0,1 in backward", 400.0, 300.0), who)
    assert words.startswith("; ranks 2,3 on other nodes") == pointed
