"""Stores values over time at several resolutions, so that drawing a year costs no more than drawing
an hour."""

from __future__ import annotations

import bisect
import math
from array import array
from collections.abc import Callable, Iterator
from typing import Any

_GROUP = 16
"""Number of points that one pair (smallest and largest) in the next coarser series represents."""

_MAX_POINTS = 100_000
"""Maximum number of points at full resolution: 17 days with a step every 15 s, 1.6 MB. Older points
remain only in the coarser series, which keep every extreme."""

_DRAWN_POINTS = 3000
"""A window with more points than this comes from a coarser series: a plot has 500 columns."""


class TimeSeries:
    """Values over time: seconds since 1970 and the value, in order."""

    def __init__(self) -> None:
        self.times = array("d")
        self.values = array("d")
        self._coarser: TimeSeries | None = None
        self._count = 0
        self._first: tuple[float, float] | None = None

    def __bool__(self) -> bool:
        return bool(self.times)

    def add(self, time: float, value: Any) -> None:
        """Append a number; ignore anything else, which leaves a gap. A month's report calls this a
        million times."""
        if type(value) is not float:
            if type(value) is not int:
                return
            value = float(value)
        elif value - value != 0.0:  # NaN or infinite
            return
        self.times.append(time)
        self.values.append(value)
        self._count += 1
        if self._count % _GROUP == 0:
            self._fold()
        elif self._count == 1:
            self._first = (time, value)

    def _fold(self) -> None:
        """Add the smallest and largest points of the last group to the coarser series, so that no
        extreme is lost."""
        if self._coarser is None:
            self._coarser = TimeSeries()
        values, start = self.values[-_GROUP:], len(self.values) - _GROUP
        for place in sorted({values.index(min(values)), values.index(max(values))}):
            self._coarser.add(self.times[start + place], values[place])
        if len(self.times) > _MAX_POINTS:
            del self.times[: _MAX_POINTS // 2], self.values[: _MAX_POINTS // 2]

    def _open_group(self) -> list[tuple[float, float]]:
        """The newest points, which are not part of a full group yet."""
        length = self._count % _GROUP
        start = len(self.times) - length
        return list(zip(self.times[start:], self.values[start:], strict=True))

    @property
    def first(self) -> tuple[float, float] | None:
        """The first point ever added."""
        return self._first

    def at(self, time: float) -> float | None:
        """The last value at or before `time`; None before the first value."""
        place = bisect.bisect_right(self.times, time) - 1
        if place >= 0:
            return self.values[place]
        return None if self._coarser is None else self._coarser.at(time)

    def next_after(self, time: float) -> float | None:
        """The time of the first point after `time`."""
        if self._coarser is not None and self.times and time < self.times[0]:
            return self._coarser.next_after(time)
        place = bisect.bisect_right(self.times, time)
        return self.times[place] if place < len(self.times) else None

    def window(
        self, start: float, end: float, max_points: int = _DRAWN_POINTS
    ) -> list[tuple[float, float]]:
        """The points from `start` to `end`, in order: all of them or, if there are more than about
        `max_points`, only the extremes of small groups."""
        first, last = bisect.bisect_left(self.times, start), bisect.bisect_right(self.times, end)
        coarser = self._coarser
        dropped = first == 0 and self._first is not None and self._first[0] < self.times[0]
        if coarser is None or (last - first <= max_points and not dropped):
            return list(zip(self.times[first:last], self.values[first:last], strict=True))
        older = coarser.window(start, end, max_points)
        return older + [point for point in self._open_group() if start <= point[0] <= end]

    def first_time(self, true: Callable[[float], bool]) -> float | None:
        """The time of the first value for which `true` holds."""
        if self._coarser is None:
            return next(self._times_where(true, -math.inf, math.inf), None)
        found = self._coarser.first_time(true)
        if found is None:
            return next((time for time, value in self._open_group() if true(value)), None)
        # `found` is the extreme of a group: an earlier value in that group may satisfy `true` too.
        place = bisect.bisect_left(self.times, found)
        begin = self.times[max(0, place - _GROUP)] if self.times else math.inf
        return next(self._times_where(true, begin, found), found)

    def _times_where(
        self, true: Callable[[float], bool], start: float, end: float
    ) -> Iterator[float]:
        first, last = bisect.bisect_left(self.times, start), bisect.bisect_right(self.times, end)
        for place in range(first, last):
            if true(self.values[place]):
                yield self.times[place]
