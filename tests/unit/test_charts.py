"""The report's charts: axis, lines, and the points that thinning keeps."""

from __future__ import annotations

import pytest

from miner_guard.show.charts import Line, Plot, draw, nice_ticks, thinned
from miner_guard.show.data import Smoother, TimeSeries


@pytest.mark.parametrize(
    ("low", "high"), [(0, 0), (0, 1e-9), (2.86, 5.5), (-3, 1e9), (5, 5), (0, 245.7)]
)
def test_ticks_enclose_what_they_measure(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 2 <= len(ticks) <= 7


def test_thinning_keeps_extremes_and_breaks_at_gaps() -> None:
    times = [float(t) for t in range(10_000) if not 4000 <= t < 6000]
    values = [1.0] * len(times)
    values[1234] = 99.0
    points = thinned(list(zip(times, values, strict=True)), (0.0, 10_000.0))
    assert (1234.0, 99.0) in points
    assert points.count(None) == 1
    assert len(points) < 1500


def test_a_line_does_not_continue_across_a_restart() -> None:
    pairs = [(time, 5.0) for time in (1.0, 2.0, 3.0, 4.0)]
    points = thinned(pairs, (1.0, 4.0), breaks=[2.5])
    assert points == [(1.0, 5.0), (2.0, 5.0), None, (3.0, 5.0), (4.0, 5.0)]


def _series(points: int, monkeypatch: pytest.MonkeyPatch, kept: int = 1000) -> TimeSeries:
    monkeypatch.setattr("miner_guard.show.data._MAX_POINTS", kept)
    series = TimeSeries()
    for number in range(points):
        series.add(float(number), 100.0 if number == 77 else -100.0 if number == 99 else 1.0)
    return series


def test_an_old_series_loses_no_extreme_and_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    series = _series(50_000, monkeypatch)
    assert len(series.times) <= 1000
    points = series.window(0.0, 50_000.0)
    assert {(77.0, 100.0), (99.0, -100.0)} <= set(points)
    assert points == sorted(points)
    assert len(points) < 7000
    assert points[-1][0] >= 49_983
    assert series.first == (0.0, 1.0)


def test_a_short_window_of_a_long_series_has_every_point(monkeypatch: pytest.MonkeyPatch) -> None:
    series = _series(50_000, monkeypatch, kept=100_000)
    assert [time for time, _ in series.window(400.0, 409.0)] == [float(t) for t in range(400, 410)]


def test_the_first_time_is_exact_although_most_values_are_thinned() -> None:
    series = TimeSeries()
    for number in range(10_000):
        series.add(float(number), float(number % 100))
    assert series.first_time(lambda value: value >= 50) == 50.0
    assert series.first_time(lambda value: value > 1000) is None


def test_the_first_step_does_not_flatten_the_others() -> None:
    series = TimeSeries()
    for number, seconds in enumerate([122.0, *[15.0] * 50]):
        series.add(float(number), seconds)
    page = draw(Plot("Step time", "s", [Line("step time", series)], off_axis=[0.0]), 0.0, 50.0)
    assert 'data-high="15"' in page
    assert "first step up to 122, off the axis" in page


def test_a_limit_outside_the_axis_is_labelled_and_not_drawn() -> None:
    series = TimeSeries()
    series.add(0.0, 5.0)
    series.add(9.0, 6.0)
    page = draw(Plot("Repo age", "s", [Line("repo age", series)], limit=2000.0), 0.0, 9.0)
    assert "limit 2000 (above this axis)" in page
    assert 'class="limit"' not in page


def test_the_smoothed_loss_does_not_depend_on_the_first_value() -> None:
    smoother = Smoother()
    means = [smoother.add(value) for value in (6.0, 3.0, 3.0, 3.0)]
    assert means[0] == 6.0
    assert means[1] == pytest.approx(4.45, abs=0.05), "of two values about their mean"
