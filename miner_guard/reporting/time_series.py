"""Values over time at several resolutions: drawing a year costs as much as drawing an hour."""

from __future__ import annotations

import bisect
import math
from array import array
from collections.abc import Callable, Iterator
from typing import Any

_GROUP = 16
"""Points that one pair of points (smallest and largest) of the next coarser series stands for."""

_MAX_POINTS = 100_000
"""Maximum points at full resolution: 17 days of a step every 15 s, 1.6 MB. Older points stay in the
coarser series, which keep every extreme."""

_DRAWN_POINTS = 3000
"""A window with more points than this is read from a coarser series: a drawing has 500 columns."""


class TimeSeries:
    """Values over time: seconds since 1970 and the value, in order."""

    def __init__(self) -> None:
        self.times = array("d")
        self.values = array("d")
        self._coarser: TimeSeries | None = None
        self._group: list[tuple[float, float]] = []
        self._first: tuple[float, float] | None = None

    def __bool__(self) -> bool:
        return bool(self.times)

    def add(self, time: float, value: Any) -> None:
        """Append a number; anything else is a gap."""
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return
        point = (time, float(value))
        self._first = self._first or point
        self.times.append(point[0])
        self.values.append(point[1])
        self._group.append(point)
        if len(self._group) == _GROUP:
            self._fold()
        if len(self.times) > _MAX_POINTS:
            del self.times[: _MAX_POINTS // 2], self.values[: _MAX_POINTS // 2]

    def _fold(self) -> None:
        """Pass the smallest and the largest point of the group on: no extreme is lost."""
        if self._coarser is None:
            self._coarser = TimeSeries()
        low = min(self._group, key=lambda point: point[1])
        high = max(self._group, key=lambda point: point[1])
        for point in sorted({low, high}):
            self._coarser.add(*point)
        self._group.clear()

    @property
    def first(self) -> tuple[float, float] | None:
        """The first point ever added."""
        return self._first

    def last_value(self) -> float | None:
        """The newest value."""
        return self.values[-1] if self.values else None

    def at(self, time: float) -> float | None:
        """The last value at or before `time`; None before the first."""
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
        self, start: float, end: float, most: int = _DRAWN_POINTS
    ) -> list[tuple[float, float]]:
        """The points from `start` to `end`, in order: all of them, or where they are more than
        about `most`, the extremes of small groups."""
        first, last = bisect.bisect_left(self.times, start), bisect.bisect_right(self.times, end)
        coarser = self._coarser
        dropped = first == 0 and self._first is not None and self._first[0] < self.times[0]
        if coarser is None or (last - first <= most and not dropped):
            return list(zip(self.times[first:last], self.values[first:last], strict=True))
        older = coarser.window(start, end, most)
        # The newest points are not part of a full group yet.
        since = coarser.times[-1]
        tail = [point for point in self._group if since < point[0] <= end and point[0] >= start]
        return older + tail

    def first_time(self, true: Callable[[float], bool]) -> float | None:
        """The time of the first value for which `true` holds."""
        if self._coarser is None:
            return next(self._times_where(true, -math.inf, math.inf), None)
        found = self._coarser.first_time(true)
        if found is None:
            return next((time for time, value in self._group if true(value)), None)
        # The extreme that was found lies in a group; an earlier value of that group may do too.
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
