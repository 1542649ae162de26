"""A week of verdicts, counted as it passes and shown as cells and shares."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner_guard.eventlog.status_document import StatusDocument
from miner_guard.record.words import percentages
from miner_guard.system.clock import FakeClock
from miner_guard.watch.state import (
    CELL_S,
    CELLS,
    STATES,
    UNWATCHED,
    Strip,
    VerdictMonitor,
    VerdictWeek,
)
from tests.support.contexts import context
from tests.support.present_state import write_status

START = 245_000 * CELL_S


def strip_of(
    week: VerdictWeek, now: float, cells: int = CELLS, current: str | None = None
) -> Strip:
    strip = week.strip(now, cells, current)
    assert strip is not None
    return strip


def test_a_cell_has_its_worst_lasting_state_and_the_strip_begins_with_the_record() -> None:
    week = VerdictWeek({})
    week.add("earning", START, START + 2 * CELL_S)
    week.add("not earning", START + 1000, START + 1060)
    week.add("stopped", START + CELL_S, START + 1.5 * CELL_S)
    strip = strip_of(week, START + 2 * CELL_S + 600)
    assert strip.cells == ["earning", "stopped", UNWATCHED]
    assert (strip.start, strip.since, strip.end) == (START, START, START + 2 * CELL_S + 600)


def test_a_start_of_some_minutes_does_not_hide_two_hours_of_earning() -> None:
    """Ten minutes of waiting for the first upload must not make the cell grey."""
    week = VerdictWeek({})
    week.add("unknown", START, START + 600)
    week.add("earning", START + 600, START + CELL_S)
    week.add("unknown", START + CELL_S, START + 1.8 * CELL_S)
    week.add("earning", START + 1.8 * CELL_S, START + 2 * CELL_S)
    assert strip_of(week, START + 2 * CELL_S - 1).cells == ["earning", "unknown"]


def test_time_without_a_guard_is_unwatched_and_counts_as_nothing_else() -> None:
    """The hours of a dead guard must neither be left out of the shares nor stay green."""
    week = VerdictWeek({})
    week.add("earning", START, START + CELL_S)
    week.add("earning", START + 2.5 * CELL_S, START + 4 * CELL_S)
    strip = strip_of(week, START + 5 * CELL_S)
    assert strip.cells == ["earning", UNWATCHED, UNWATCHED, "earning", UNWATCHED, UNWATCHED]
    assert strip.shares == pytest.approx({"earning": 0.5, UNWATCHED: 0.5})


def test_a_record_of_an_older_guard_has_a_start_too() -> None:
    """A status that names no start must not make the first cell unwatched."""
    week = VerdictWeek({"245000": {"earning": 600.0}, "245001": {"earning": 7200.0}})
    strip = strip_of(week, START + 2 * CELL_S - 1)
    assert (strip.since, strip.shares) == (START + CELL_S - 600, {"earning": 1.0})


def test_the_verdict_of_now_is_in_the_strip_however_brief() -> None:
    week = VerdictWeek({})
    week.add("earning", START, START + 5000)
    week.add("not earning", START + 5000, START + 5010)
    assert strip_of(week, START + 5010).cells[-1] == "earning"
    assert strip_of(week, START + 5010, current="not earning").cells[-1] == "not earning"


def test_wider_cells_show_the_same_week() -> None:
    week = VerdictWeek({})
    week.add("earning", START - 40 * CELL_S, START)
    narrow, wide = strip_of(week, START - 1), strip_of(week, START - 1, 28)
    assert (len(wide.cells), wide.since, wide.shares) == (20, narrow.since, narrow.shares)


def test_a_hang_found_late_does_not_count_as_earning() -> None:
    """Minutes of silence must not stay green just because the hang was found only afterwards."""
    week = VerdictWeek({})
    week.add("earning", START, START + 3600)
    week.correct("earning", "not earning", START + 2700, START + 3600)
    assert strip_of(week, START + 3600).shares == {"earning": 0.75, "not earning": 0.25}


def test_a_week_is_bounded_and_survives_its_own_json() -> None:
    week = VerdictWeek({})
    for cell in range(10 * CELLS):
        week.add("earning", START + cell * CELL_S, START + (cell + 1) * CELL_S)
    stored = week.to_json()
    assert len(stored) <= CELLS
    assert VerdictWeek(stored).to_json() == stored
    assert VerdictWeek({"x": {"earning": 1.0}}).strip(0.0) is None


@given(st.lists(st.tuples(st.sampled_from(STATES), st.floats(0, 3 * CELL_S)), max_size=30))
def test_no_second_is_lost_or_counted_twice(parts: list[tuple[str, float]]) -> None:
    week, now = VerdictWeek({}), START
    for state, seconds in parts:
        week.add(state, now, now + seconds)
        now += seconds
    counted = sum(itertools.chain.from_iterable(c.values() for c in week._cells.values()))
    assert counted <= CELLS * CELL_S + 1
    if now - START < (CELLS - 1) * CELL_S:
        assert counted == pytest.approx(now - START, abs=1e-3)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=9))
def test_percentages_never_exceed_the_whole_and_never_read_0(parts: list[float]) -> None:
    whole = sum(parts)
    shown = percentages({str(n): part / whole for n, part in enumerate(parts)})
    numbers = [int(text.rstrip("%")) for text in shown.values() if text != "<1%"]
    assert sum(numbers) == 100 or (sum(numbers) < 100 and "<1%" in shown.values())
    assert 0 not in numbers


def test_the_next_guard_continues_the_week(tmp_path: Path) -> None:
    """The strip must not start over at each restart of the guard."""
    clock, status = FakeClock(), {"state": "paused"}
    guard = VerdictMonitor(context(tmp_path, clock=clock, status=lambda: status))
    for _ in range(100):
        clock.advance(60.0)
        list(guard.on_tick(clock.monotonic(), {}))
    write_status(tmp_path, {"verdict": guard.snapshot()})
    clock.advance(86_400)
    following = VerdictMonitor(context(tmp_path, clock=clock, status=lambda: status))
    week = StatusDocument.from_json({"verdict": following.snapshot()}).verdict
    assert week is not None
    strip = VerdictWeek(week.week, week.week_start).strip(clock.wall())
    assert strip is not None
    assert strip.shares[UNWATCHED] == pytest.approx(86_400 / 92_400)
    assert strip.shares["stopped"] > 0.06
    assert strip.cells[-1] == UNWATCHED


def test_no_verdict_counts_the_time_of_a_suspended_host(tmp_path: Path) -> None:
    clock, status = FakeClock(), {"state": "paused"}
    guard = VerdictMonitor(context(tmp_path, clock=clock, status=lambda: status))
    for seconds in (6.0, 6.0, 36_000.0, 6.0):
        clock.advance(seconds)
        list(guard.on_tick(clock.monotonic(), {}))
    counted = [sum(cell.values()) for cell in guard.snapshot()["week"].values()]
    assert sum(counted) < 60
