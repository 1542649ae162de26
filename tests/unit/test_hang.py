"""Lack of progress: when it is a hang, when it is not, and which rank is holding up the others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

from miner_guard.config import HangSettings
from miner_guard.rank.layout import Identity, Now
from miner_guard.rank.phases import PhaseNames, Phases
from miner_guard.record.words import rank_list
from miner_guard.watch.evidence import Subject
from miner_guard.watch.hang import (
    Hang,
    HangDetector,
    Processes,
    _elsewhere,
    describe,
    name_culprits,
)

SETTINGS = HangSettings(min_s=300.0, factor=5.0, first_step_s=1800.0, allreduce_s=840.0)


def rank(
    phase: str = "",
    since: float = 0.0,
    steps: int = 10,
    state: str = "running",
    allowance: float | None = None,
    heartbeat: float | None = None,
) -> Now:
    beat = since if heartbeat is None else heartbeat
    return Now(
        state, phase, since, beat, 1, steps, steps, None, None, None, allowance, steps, 0, 0, 0
    )


def watch(
    detector: HangDetector, start: float, end: float, ranks: dict[int, Now]
) -> tuple[float, Hang] | None:
    """Check once a second; returns the time and the hang, or None."""
    now = start
    while now <= end:
        hang = detector.check(now, ranks)
        if hang is not None:
            return now, hang
        now += 1.0
    return None


@pytest.fixture
def detector() -> HangDetector:
    """A detector launched at 0, with one step of 10 s that ended at 100."""
    detector = HangDetector(SETTINGS)
    detector.launched(0.0)
    detector.stepped(100.0, 10.0)
    return detector


def test_the_rank_outside_the_collective_is_named(detector: HangDetector) -> None:
    ranks = {n: rank("allreduce", 101.0, allowance=0.0) for n in (0, 1, 3)} | {
        2: rank("data", 100.0)
    }
    seen = watch(detector, 101.0, 2000.0, ranks)
    assert seen is not None
    when, hang = seen
    assert when == pytest.approx(400.0, abs=2)
    assert hang.culprits == (2,)
    assert hang.detail == f"rank 2 in data for {when - 100:.0f}s, ranks 0,1,3 waiting in allreduce"


def test_slow_steps_stretch_the_limit(detector: HangDetector) -> None:
    detector.stepped(400.0, 240.0)
    seen = watch(detector, 401.0, 5000.0, {0: rank("forward", 400.0)})
    assert seen is not None
    assert seen[0] == pytest.approx(400.0 + 5 * 240.0, abs=2)


@pytest.mark.parametrize(
    ("phase", "allowed"),
    [
        ("allreduce", 840.0),
        ("upload", 1800.0),
        ("load_state", 1800.0),
        ("val_loss", 1800.0),
        ("monitor", 1800.0),
        ("checkpoint", 1800.0),
    ],
)
def test_a_phase_with_an_allowance_may_take_it_and_no_more(
    detector: HangDetector, phase: str, allowed: float
) -> None:
    ranks = {0: rank(phase, 110.0), 1: rank("collective", 110.0)}
    seen = watch(detector, 111.0, 5000.0, ranks)
    assert seen is not None
    assert seen[0] == pytest.approx(110.0 + allowed, abs=2)


class Shown:
    """The hook's view of a rank's phases, as the detector reads it."""

    def show_phase(self, name: bytes, since: float, heartbeat: float, allowance_s: float) -> None:
        known = None if math.isnan(allowance_s) else allowance_s
        self.now = rank(name.decode(), since, allowance=known, heartbeat=heartbeat)


@pytest.mark.parametrize(
    ("outer", "allowance", "allowed"), [("val_loss", None, 1800.0), ("search", 400.0, 400.0)]
)
def test_what_is_nested_in_a_long_phase_has_its_time_and_no_more(
    detector: HangDetector, outer: str, allowance: float | None, allowed: float
) -> None:
    """Validation fetches data and runs forward passes, over and over."""
    now, shown = 101.0, Shown()
    open_phases = Phases(shown, lambda: now)
    phases = PhaseNames(open_phases, SETTINGS.allowances)
    with phases.named(outer, allowance):
        while now < 3000.0:
            with phases.named("data"):
                for _ in range(5):
                    now += 1.0
                    if detector.check(now, {0: shown.now}) is not None:
                        assert now == pytest.approx(101.0 + allowed, abs=2)
                        return
            now += 1.0
            detector.check(now, {0: shown.now})
    pytest.fail("a phase without an end is a hang")


def test_short_phases_that_declare_an_allowance_again_and_again_are_not_progress(
    detector: HangDetector,
) -> None:
    now, shown = 101.0, Shown()
    open_phases = Phases(shown, lambda: now)
    phases = PhaseNames(open_phases, SETTINGS.allowances)
    while now < 3000.0:
        with phases.named("data", 10.0):
            now += 5.0
            if detector.check(now, {0: shown.now}) is not None:
                assert now == pytest.approx(401.0, abs=6)
                return
    pytest.fail("it is not seen")


def test_after_a_long_phase_the_usual_limit_counts_from_its_end(detector: HangDetector) -> None:
    assert watch(detector, 101.0, 1000.0, {0: rank("upload", 101.0)}) is None
    seen = watch(detector, 1001.0, 3000.0, {0: rank("data", 1000.5)})
    assert seen is not None
    assert seen[0] == pytest.approx(1300.5, abs=2)


def test_an_allreduce_within_a_step_does_not_stretch_the_limit_of_the_steps_after(
    detector: HangDetector,
) -> None:
    """Otherwise the guard would notice a hang only after fifty minutes, because a step with an
    AllReduce took ten."""
    detector.stepped(700.0, 600.0, {"allreduce": 590.0, "forward": 6.0})
    seen = watch(detector, 701.0, 5000.0, {0: rank("data", 700.5)})
    assert seen is not None
    assert seen[0] == pytest.approx(1000.0, abs=2)


def test_the_allowance_that_a_rank_declares_wins(detector: HangDetector) -> None:
    assert watch(detector, 101.0, 3000.0, {0: rank("compile", 101.0, allowance=3600.0)}) is None


def test_the_first_step_has_its_own_allowance() -> None:
    detector = HangDetector(SETTINGS)
    detector.launched(0.0)
    seen = watch(detector, 1.0, 3000.0, {0: rank("forward", 1.0, steps=0)})
    assert seen is not None
    assert seen[0] == pytest.approx(1800.0, abs=2)


def test_entering_a_phase_again_and_again_is_not_progress(detector: HangDetector) -> None:
    now = 101.0
    hang = None
    while hang is None and now < 1000.0:
        hang = detector.check(now, {0: rank("data", now - 0.5)})
        now += 1.0
    assert now == pytest.approx(401.0, abs=3)


def test_a_suspended_machine_is_not_a_hang(detector: HangDetector) -> None:
    ranks = {0: rank("forward", 100.0)}
    assert watch(detector, 101.0, 200.0, ranks) is None
    # No check for an hour means that this process did not run, so it knows nothing about the miner.
    assert detector.check(3800.0, ranks) is None
    assert watch(detector, 3801.0, 3990.0, ranks) is None
    assert watch(detector, 3991.0, 4010.0, ranks) is not None


def test_a_hang_is_reported_once_and_a_second_one_like_the_first(detector: HangDetector) -> None:
    ranks = {0: rank("forward", 100.0)}
    assert watch(detector, 101.0, 500.0, ranks) is not None
    assert watch(detector, 501.0, 2000.0, ranks) is None
    detector.stepped(2000.0, 10.0)
    assert watch(detector, 2001.0, 2400.0, ranks) is not None


def test_without_a_rank_nothing_is_reported() -> None:
    detector = HangDetector(SETTINGS)
    detector.launched(0.0)
    assert watch(detector, 1.0, 5000.0, {}) is None


def test_a_process_that_outlives_its_training_is_a_hang(detector: HangDetector) -> None:
    ranks = {0: rank(state="closed", heartbeat=150.0), 1: rank(state="closed", heartbeat=151.0)}
    seen = watch(detector, 152.0, 2000.0, ranks)
    assert seen is not None
    assert "is still running" in seen[1].detail


def test_torchruns_wait_for_the_other_nodes_at_its_end_is_not_a_hang() -> None:
    """A node that is done first, or whose peer is lost, waits at torchrun's exit barrier: 300 s by
    default."""
    detector = HangDetector(HangSettings())
    detector.launched(0.0)
    detector.stepped(100.0, 10.0)
    ranks = {0: rank(state="finished", heartbeat=110.0), 1: rank(state="finished", heartbeat=110.0)}
    assert watch(detector, 111.0, 110.0 + 300 + 10, ranks) is None
    assert watch(detector, 421.0, 600.0, ranks) is not None


def test_a_rank_that_is_gone_is_the_culprit(detector: HangDetector) -> None:
    hang = detector.check(101.0, {0: rank("backward")}) or detector.check(
        102.0, {0: rank("backward"), 1: rank("backward")}, Processes(gone={1})
    )
    assert hang is None
    detector.stepped(102.0, 1.0)
    now = 103.0
    while hang is None:
        hang = detector.check(
            now, {0: rank("backward", 102.0), 1: rank("backward", 102.0)}, Processes(gone={1})
        )
        now += 1.0
    assert hang.culprits == (1,)
    assert hang.detail.startswith("rank 1 is gone, rank 0 waiting in backward")


@pytest.mark.parametrize(
    ("ranks", "culprits"),
    [
        ({0: rank("backward", steps=9), 1: rank("data", steps=10)}, (0,)),
        ({0: rank("val_loss"), 1: rank("allreduce"), 2: rank("allreduce")}, (0,)),
        ({0: rank("backward"), 1: rank("forward"), 2: rank("backward")}, (1,)),
        ({0: rank("allreduce"), 1: rank("allreduce")}, ()),
        ({0: rank("collective"), 1: rank(state="closed")}, (1,)),
        ({0: rank("data")}, (0,)),
    ],
)
def test_the_culprit_is_behind(ranks: dict[int, Now], culprits: tuple[int, ...]) -> None:
    assert name_culprits(ranks) == culprits


@pytest.mark.parametrize(
    ("alone", "culprits"),
    [
        (rank("data"), (0,)),
        (rank("upload"), (0,)),
        (rank(state="closed"), (0,)),
        (rank("forward"), ()),
        (rank("allreduce"), ()),
        (rank(""), ()),
    ],
)
def test_a_rank_alone_on_its_node_is_blamed_only_if_it_waits_for_no_other_node(
    alone: Now, culprits: tuple[int, ...]
) -> None:
    """A node must not blame its own rank while that rank waits for another node's."""
    assert name_culprits({0: alone}, Processes(elsewhere=1)) == culprits
    assert name_culprits({0: alone}, Processes(gone={0}, elsewhere=1)) == (0,)
    assert name_culprits({0: alone}) == (0,)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((2,), "rank 2"),
        ((0, 1, 3), "ranks 0,1,3"),
        ((0, 1, 2), "ranks 0-2"),
        ((0, 1, 2, 3, 5, 7, 8), "ranks 0-3,5,7,8"),
        (range(1024), "ranks 0-1023"),
    ],
)
def test_many_ranks_are_listed_as_ranges(ranks: Iterable[int], words: str) -> None:
    assert rank_list(ranks) == words


def test_a_stopped_process_is_named_whatever_its_place_in_the_step(detector: HangDetector) -> None:
    """The guard must not name `rank 0 in data`, which merely waits, when rank 1 has received
    SIGSTOP."""
    ranks = {0: rank("data", 101.0), 1: rank("backward", 101.0)}
    hang = detector.check(460.0, ranks, Processes(stopped={1})) or detector.check(
        461.0, ranks, Processes(stopped={1})
    )
    assert hang is not None
    assert hang.culprits == (1,)
    assert "rank 1 in backward for" in hang.detail
    assert "its process is stopped (state T), rank 0 waiting in data" in hang.detail


def test_ranks_that_wait_in_init_for_one_that_never_comes_name_it() -> None:
    detector = HangDetector(SETTINGS)
    detector.launched(0.0)
    ranks = {0: rank(since=5.0, steps=0, state="starting")}
    now, hang = 5.0, None
    while hang is None and now < 3000.0:
        now += 1.0
        hang = detector.check(now, ranks, Processes(absent={1}))
    assert hang is not None
    assert now == pytest.approx(1800.0, abs=2)
    assert hang.culprits == (1,)
    assert hang.detail == "rank 1 has not called init(), rank 0 waiting before its first step"


def before_init(cpu_share: float, prints: bool) -> float | None:
    """Seconds until the detector finds a hang in a miner whose ranks never report; None if two
    hours pass first."""
    detector = HangDetector(SETTINGS)
    detector.launched(0.0)
    for now in range(1, 7200):
        if now % 10 == 0:
            detector.used_cpu(now, cpu_share * now)
        if prints:
            detector.printed(now)
        if detector.check(now, {}) is not None:
            return now
    return None


def test_silence_without_cpu_time_before_init_is_a_hang_and_work_is_not() -> None:
    """A miner may wait for a lock before `init` forever, or tokenize for hours."""
    assert before_init(cpu_share=0.01, prints=False) == pytest.approx(1800.0, abs=12)
    assert before_init(cpu_share=0.9, prints=False) is None
    assert before_init(cpu_share=0.0, prints=True) is None


def test_an_exit_that_hangs_after_all_ranks_have_finished_is_distinguished_from_one_that_failed(
    detector: HangDetector,
) -> None:
    for state, finished in (("finished", True), ("closed", False)):
        detector.launched(0.0)
        seen = watch(detector, 152.0, 2000.0, {0: rank(state=state, heartbeat=150.0)})
        assert seen is not None
        assert seen[1].finished is finished


def test_a_rank_that_died_is_named_before_the_usual_limit(detector: HangDetector) -> None:
    ranks = {0: rank("backward", 101.0), 1: rank("backward", 101.0)}
    hang = detector.lost(150.0, ranks, Processes(gone={1}), 45.0)
    assert hang is not None
    assert (hang.culprits, hang.limit_s) == ((1,), 45.0)
    assert detector.lost(151.0, ranks, Processes(gone={1}), 45.0) is None, "once"


@pytest.mark.parametrize("count", [8, 64, 256, 1024])
def test_a_hang_of_many_ranks_fits_on_a_line(count: int) -> None:
    """Whole nodes hang at the same time, which must not lead to a 4 KB line."""
    ranks = {
        number: rank("data" if number < count // 2 else "allreduce", -float(number % 7))
        for number in range(count)
    }
    words = describe(0.0, ranks, range(count // 2))
    assert len(words) < 160
    if count > 8:
        half = count // 2
        assert words == (
            f"ranks 0-{half - 1} in data for 6s, ranks {half}-{count - 1} waiting in allreduce"
        )


def test_a_late_node_is_named_where_no_rank_here_stands_out(detector: HangDetector) -> None:
    waiting = {n: rank("collective", 100.0) for n in range(2)}
    what = "a rank on node b with rank 2 did not ask in time"
    assert detector.late(160.0, waiting, 60.0, what).detail.endswith(f": {what}")
    one_is_late = {**waiting, 1: rank("data", 100.0)}
    assert what not in detector.late(160.0, one_is_late, 60.0, what).detail


@pytest.mark.parametrize(("world_size", "expected"), [(4, "2 ranks on other nodes"), (2, "")])
def test_where_no_rank_here_stands_out_the_other_nodes_are_pointed_to(
    world_size: int, expected: str
) -> None:
    """Otherwise no rank would seem to be at fault in another node's hang."""
    who = [
        Subject(n, Identity(1, n, n, world_size, 1, "run", 0.0, 2), rank("backward"), False)
        for n in range(2)
    ]
    unattributed = Hang((), "no rank stands out, ranks 0,1 in backward", 400.0, 300.0)
    words = _elsewhere(unattributed, who)
    assert words.startswith(f"; {expected}") if expected else not words
    assert not _elsewhere(Hang((0,), "rank 0 in data", 400.0, 300.0), who)


def operating(since: float, phase: str = "") -> Now:
    header = rank(phase, since=since, heartbeat=100.0)
    return replace(header, operation="evolution_snapshot", operation_since=since)


def test_a_monitoring_operation_ends_only_after_its_own_allowance(detector: HangDetector) -> None:
    """Source 000's incident: an evaluation of minutes inside `track()` was killed as a hang."""
    ranks = {0: operating(110.0), 1: rank("allreduce", since=111.0)}
    assert watch(detector, 110.0, 110.0 + 1799.0, ranks) is None
    late = watch(detector, 1910.0, 1920.0, ranks)
    assert late is not None
    at, hang = late
    assert (at, hang.culprits, hang.limit_s) == (1911.0, (0,), 1800.0)
    assert hang.detail == "rank 0 in evolution_snapshot for 1801s, rank 1 waiting in allreduce"


def test_after_a_monitoring_operation_the_usual_limit_starts_anew(detector: HangDetector) -> None:
    assert watch(detector, 110.0, 1000.0, {0: operating(110.0)}) is None
    hang = watch(detector, 1001.0, 2000.0, {0: rank(since=100.0)})
    assert hang is not None
    assert hang[0] == 1302.0
