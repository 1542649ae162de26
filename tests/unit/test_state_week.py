"""A week of states, counted as it passes and shown as cells and shares."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner_guard.record.status_document import StatusDocument
from miner_guard.record.words import percentages
from miner_guard.system.clock import FakeClock
from miner_guard.watch.state import StateMonitor
from miner_guard.watch.state_words import (
    CELL_S,
    CELLS,
    GREEN,
    GREY,
    RED,
    UNWATCHED,
    WORST_FIRST,
    StateWeek,
    Strip,
)
from tests.support.contexts import context
from tests.support.present_state import write_status

START = 245_000 * CELL_S


def strip_of(week: StateWeek, now: float, cells: int = CELLS, current: str | None = None) -> Strip:
    strip = week.strip(now, cells, current)
    assert strip is not None
    return strip


def test_a_cell_has_its_worst_lasting_colour_and_the_strip_begins_with_the_record() -> None:
    week = StateWeek({})
    week.add(GREEN, START, START + 2 * CELL_S)
    week.add(RED, START + 1000, START + 1060)
    week.add(RED, START + CELL_S, START + 1.5 * CELL_S)
    strip = strip_of(week, START + 2 * CELL_S + 600)
    assert strip.cells == [GREEN, RED, UNWATCHED]
    assert (strip.start, strip.since, strip.end) == (START, START, START + 2 * CELL_S + 600)


def test_the_first_minutes_of_a_good_run_are_green_and_so_is_a_finished_one() -> None:
    """A solid red strip once stood under a green EARNING."""
    week = StateWeek({})
    week.add(GREY, START, START + 30)
    assert strip_of(week, START + 30, current=GREY).cells == [GREY]
    week.add(GREEN, START + 30, START + 90)
    assert strip_of(week, START + 90, current=GREEN).cells == [GREEN]
    week.add(GREY, START + 90, START + 100)
    assert strip_of(week, START + 100, current=GREY).cells == [GREEN]


def test_time_without_a_guard_is_unwatched_and_counts_as_nothing_else() -> None:
    week = StateWeek({})
    week.add(GREEN, START, START + CELL_S)
    week.add(GREEN, START + 2.5 * CELL_S, START + 4 * CELL_S)
    strip = strip_of(week, START + 5 * CELL_S)
    assert strip.cells == [GREEN, UNWATCHED, UNWATCHED, GREEN, UNWATCHED, UNWATCHED]
    assert strip.shares == pytest.approx({GREEN: 0.5, UNWATCHED: 0.5})


def test_the_state_of_now_is_in_the_strip_however_brief() -> None:
    week = StateWeek({})
    week.add(GREEN, START, START + 5000)
    week.add(RED, START + 5000, START + 5010)
    assert strip_of(week, START + 5010).cells[-1] == GREEN
    assert strip_of(week, START + 5010, current=RED).cells[-1] == RED


def test_wider_cells_show_the_same_week() -> None:
    week = StateWeek({})
    week.add(GREEN, START - 40 * CELL_S, START)
    narrow, wide = strip_of(week, START - 1), strip_of(week, START - 1, 28)
    assert (len(wide.cells), wide.since, wide.shares) == (20, narrow.since, narrow.shares)


def test_a_hang_found_late_does_not_count_as_well() -> None:
    week = StateWeek({})
    week.add(GREEN, START, START + 3600)
    week.correct(GREEN, RED, START + 2700, START + 3600)
    assert strip_of(week, START + 3600).shares == {GREEN: 0.75, RED: 0.25}


def test_a_week_is_bounded_and_survives_its_own_json() -> None:
    week = StateWeek({})
    for cell in range(10 * CELLS):
        week.add(GREEN, START + cell * CELL_S, START + (cell + 1) * CELL_S)
    stored = week.to_json()
    assert len(stored) <= CELLS
    assert StateWeek(stored).to_json() == stored
    assert StateWeek({"x": {GREEN: 1.0}}).strip(0.0) is None


@given(st.lists(st.tuples(st.sampled_from(WORST_FIRST), st.floats(0, 3 * CELL_S)), max_size=30))
def test_no_second_is_lost_or_counted_twice(parts: list[tuple[str, float]]) -> None:
    week, now = StateWeek({}), START
    for colour, seconds in parts:
        week.add(colour, now, now + seconds)
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
    """The strip must not start over at each restart of the guard, and no state counts the time of
    a suspended host."""
    clock, status = FakeClock(), {"state": "paused"}
    guard = StateMonitor(context(tmp_path, clock=clock, status=lambda: status))
    for _ in range(100):
        clock.advance(60.0)
        list(guard.on_tick(clock.monotonic(), {}))
    write_status(tmp_path, {"verdict": guard.snapshot()})
    clock.advance(86_400)
    following = StateMonitor(context(tmp_path, clock=clock, status=lambda: status))
    state = StatusDocument.from_json({"verdict": following.snapshot()}).verdict
    assert state is not None
    strip = StateWeek(state.week, state.week_start).strip(clock.wall())
    assert strip is not None
    assert strip.shares[UNWATCHED] == pytest.approx(86_400 / 92_400)
    assert strip.cells[-1] == UNWATCHED
    for seconds in (6.0, 36_000.0, 6.0):
        clock.advance(seconds)
        list(following.on_tick(clock.monotonic(), {}))
    counted = [sum(cell.values()) for cell in following.snapshot()["week"].values()]
    assert sum(counted) < 6000 + 60
