"""A week of states, recorded as changes and shown as cells and shares."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner_guard.record.status_document import StatusDocument
from miner_guard.record.words import percentages
from miner_guard.system.clock import FakeClock
from miner_guard.watch.state import StateMonitor
from miner_guard.watch.state_words import (
    GREEN,
    GREY,
    MAX_CHANGES,
    RED,
    UNWATCHED,
    WEEK_S,
    WORST_FIRST,
    Changes,
    Strip,
    strip_of,
    week_of,
    with_change,
)
from tests.support.contexts import context
from tests.support.present_state import write_status

HOUR = 3600.0


def strip(changes: Changes, end: float, cells: int = 4, current: str | None = None) -> Strip:
    found = strip_of(changes, end, cells, current)
    assert found is not None
    return found


def test_a_cell_has_its_worst_lasting_colour() -> None:
    changes = [(0.0, GREEN), (1000.0, RED), (1060.0, GREEN), (1.5 * HOUR, RED), (2 * HOUR, GREEN)]
    found = strip(changes, 4 * HOUR)
    assert (found.cells, found.cell_s) == ([GREEN, RED, GREEN, GREEN], HOUR)
    assert found.shares == pytest.approx({GREEN: 3.4833 / 4, RED: 0.5167 / 4}, rel=1e-3)


def test_the_first_minutes_of_a_good_run_are_green_and_so_is_a_finished_one() -> None:
    """A solid red strip once stood under a green EARNING."""
    assert set(strip([(0.0, GREY)], 30.0, current=GREY).cells) == {GREY}
    changes = [(0.0, GREY), (30.0, GREEN)]
    assert strip(changes, 90.0, 1, current=GREEN).cells == [GREEN]
    assert strip([*changes, (90.0, GREY)], 100.0, 1, current=GREY).cells == [GREEN]


def test_the_state_of_now_is_in_the_strip_however_brief() -> None:
    changes = [(0.0, GREEN), (5000.0, RED)]
    assert strip(changes, 5010.0).cells[-1] == GREEN
    assert strip(changes, 5010.0, current=RED).cells[-1] == RED


def test_a_hang_found_late_does_not_count_as_well() -> None:
    changes = with_change([(0.0, GREEN), (3000.0, GREY)], RED, 2700.0)
    assert strip(changes, 3600.0).shares == {GREEN: 0.75, RED: 0.25}


def test_a_week_is_bounded_and_keeps_what_held_when_it_began() -> None:
    changes: Changes = []
    for number in range(3 * MAX_CHANGES):
        changes = with_change(changes, WORST_FIRST[number % 3], 60.0 * number)
    assert len(changes) == MAX_CHANGES
    old = with_change([(0.0, GREEN)], RED, 3 * WEEK_S)
    assert strip(old, 3 * WEEK_S + 1).start == 2 * WEEK_S + 1
    assert strip_of([], 1.0, 4) is None


@given(st.lists(st.tuples(st.sampled_from(WORST_FIRST), st.floats(0, 3 * HOUR)), max_size=30))
def test_no_second_is_lost_or_counted_twice(parts: list[tuple[str, float]]) -> None:
    changes, now = with_change([], GREEN, 0.0), HOUR
    for colour, seconds in parts:
        changes = with_change(changes, colour, now)
        now += seconds
    assert sum(strip(changes, now + 1.0).shares.values()) == pytest.approx(1.0)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=9))
def test_percentages_never_exceed_the_whole_and_never_read_0(parts: list[float]) -> None:
    whole = sum(parts)
    shown = percentages({str(n): part / whole for n, part in enumerate(parts)})
    numbers = [int(text.rstrip("%")) for text in shown.values() if text != "<1%"]
    assert sum(numbers) == 100 or (sum(numbers) < 100 and "<1%" in shown.values())
    assert 0 not in numbers


def test_the_next_guard_continues_the_week(tmp_path: Path) -> None:
    """The strip must not start over at each restart of the guard, and no state counts the time of
    a suspended host or of no guard."""
    clock, status = FakeClock(), {"state": "paused"}
    guard = StateMonitor(context(tmp_path, clock=clock, status=lambda: status))
    for _ in range(100):
        clock.advance(60.0)
        list(guard.on_tick(clock.monotonic(), {}))
    write_status(tmp_path, {"verdict": guard.snapshot()}, age_s=86_400)
    clock.advance(86_400)
    following = StateMonitor(context(tmp_path, clock=clock, status=lambda: status))
    for seconds in (6.0, 36_000.0, 6.0):
        clock.advance(seconds)
        list(following.on_tick(clock.monotonic(), {}))
    changes = following.snapshot()["changes"]
    assert [colour for _, colour in changes] == [GREY, UNWATCHED, GREY, UNWATCHED, GREY]
    found = strip(changes, clock.wall())
    assert found.shares[UNWATCHED] == pytest.approx(122_400 / 128_412, rel=1e-3)


def test_the_strip_of_a_guard_that_is_gone_ends_with_no_guard() -> None:
    document = {
        "updated": "2026-01-02T03:00:00.000000Z",
        "age_s": 3600.0,
        "gone": True,
        "verdict": {"colour": GREEN, "changes": [(1767319200.0, GREEN)]},
    }
    found = week_of(StatusDocument.from_json(document), 4)
    assert found is not None
    assert (found.cells, found.shares) == (
        [GREEN, GREEN, UNWATCHED, UNWATCHED],
        {GREEN: 0.5, UNWATCHED: 0.5},
    )
