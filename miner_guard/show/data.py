"""Reads the report's data from run.db; after the first time, only new events."""

from __future__ import annotations

import bisect
import heapq
import math
import operator
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from miner_guard import state_dir
from miner_guard.record.public import public, public_values
from miner_guard.record.status_document import StatusDocument, read_status
from miner_guard.record.store import RunReader, StoredEvent
from miner_guard.system.clock import parse_iso_utc

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


_STEP = "inner_step"
_SNAPSHOT = "health_snapshot"
_MARKS = frozenset(
    {
        "slow_step",
        "loss_nan",
        "loss_spike",
        "loss_divergence",
        "miner_started",
        "miner_restarting",
        "miner_exited",
        "miner_finished",
        "hang_detected",
        "crash_loop",
        "upload_succeeded",
        "upload_failed",
        "upload_blocked",
        "upload_allowed",
        "repo_stale",
        "incident",
        "gpu_diagnostics",
        "cpu_fallback",
        "model_on_cpu",
        "low_gpu_memory",
        "straggler",
        "gpu_drop",
        "gpu_fault",
        "audit_passed",
        "audit_failed",
        "monitoring_over_budget",
        "disk_full",
        "disk_stuck",
        "checkpoint_saved",
        "chain_unregistered",
        "guard_killed",
    }
)
_KEPT = 5_000
"""Keep at least this many of each event's newest marks for plots and tables; the first mark is
always kept."""

_SMOOTH_HALF_STEPS = 10.0
"""Half-life of a value in the smoothed loss, in steps."""

_DECAY = 0.5 ** (1 / _SMOOTH_HALF_STEPS)


@dataclass(frozen=True)
class Mark:
    """An event with its time."""

    time: float
    event: str
    level: str
    msg: str
    fields: Mapping[str, Any]


class Smoother:
    """An exponential moving average, debiased as in TensorBoard: the first value, usually the
    highest loss of a run, gets no extra weight."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float) -> float:
        """Return the mean including `value`."""
        self._sum = _DECAY * self._sum + (1 - _DECAY) * value
        self._weight = _DECAY * self._weight + (1 - _DECAY)
        return self._sum / self._weight


@dataclass
class Data:
    """All the data that the report shows."""

    status: StatusDocument = field(default_factory=StatusDocument)
    loss: TimeSeries = field(default_factory=TimeSeries)
    loss_smooth: TimeSeries = field(default_factory=TimeSeries)
    smoother: Smoother = field(default_factory=Smoother)
    step_time: TimeSeries = field(default_factory=TimeSeries)
    step_memory: TimeSeries = field(default_factory=TimeSeries)
    inner_step: TimeSeries = field(default_factory=TimeSeries)
    repo_age: TimeSeries = field(default_factory=TimeSeries)
    gpu_use: TimeSeries = field(default_factory=TimeSeries)
    gpu_memory: TimeSeries = field(default_factory=TimeSeries)
    goodput: TimeSeries = field(default_factory=TimeSeries)
    rank_work: dict[str, TimeSeries] = field(default_factory=dict)
    marks: dict[str, list[Mark]] = field(default_factory=dict)
    """Marks by event, oldest first."""

    counts: Counter[str] = field(default_factory=Counter)
    first: float | None = None
    last: float | None = None
    host: str = ""
    costs: Mapping[str, Any] | None = None

    def of(self, *events: str) -> list[Mark]:
        """The marks for these events, oldest first."""
        lists = [self.marks[event] for event in events if event in self.marks]
        return (
            lists[0]
            if len(lists) == 1
            else list(heapq.merge(*lists, key=operator.attrgetter("time")))
        )

    def add_mark(self, mark: Mark) -> None:
        """Add a mark. Once an event has more than twice `_KEPT` marks, drop the older ones, except
        the first, which dates a milestone."""
        kept = self.marks.setdefault(mark.event, [])
        kept.append(mark)
        if len(kept) > 2 * _KEPT:
            del kept[1:-_KEPT]

    def window(self, start: float, end: float) -> Data:
        """The same run from `start` to `end`, in seconds since 1970. Contains only the window's
        marks and counts; the series stay complete, because they are read by time."""
        marks = {
            event: found
            for event, kept in self.marks.items()
            if (found := [mark for mark in kept if start <= mark.time <= end])
        }
        return replace(
            self,
            marks=marks,
            counts=Counter({event: len(found) for event, found in marks.items()}),
            first=None if self.first is None else max(self.first, start),
            last=None if self.last is None else min(self.last, end),
        )


class LogReader:
    """A state directory's data, kept up to date by reading only new lines."""

    def __init__(self, state: state_dir.StateDir, since: str = "") -> None:
        self._state = state
        self._events = RunReader(state.db)
        self._since, self._last_id = since, 0
        self._data: Data | None = None

    def refresh(self) -> Data:
        """Read new events and return the current data. Call it from one thread at a time."""
        if self._data is None:
            self._data = Data()
        for event in self._events.events(since=self._since, after=self._last_id):
            _take(self._data, event)
            self._last_id = event.id
        costs = state_dir.read_json(self._state.costs)
        self._data.status = read_status(self._state) or StatusDocument()
        self._data.costs = costs if isinstance(costs, dict) and "operations" in costs else None
        return self._data


def gather(state: state_dir.StateDir, since: str = "") -> Data:
    """Read the state directory once."""
    return LogReader(state, since).refresh()


def _take(data: Data, event: StoredEvent) -> None:
    data.counts[event.name] += 1
    when = parse_iso_utc(event.ts)
    data.host = event.host or data.host
    data.first = when if data.first is None else min(data.first, when)
    data.last = when if data.last is None else max(data.last, when)
    if event.name == _STEP:
        _take_step(data, when, event.fields)
    elif event.name == _SNAPSHOT:
        _take_snapshot(data, when, event.fields)
    elif event.name in _MARKS or event.level in ("error", "critical"):
        record = {**event.record(), **public_values(event.fields)}
        data.add_mark(Mark(when, event.name, event.level, public(event.text), record))


def _take_step(data: Data, when: float, record: Mapping[str, Any]) -> None:
    loss = record.get("loss")
    data.loss.add(when, loss)
    if isinstance(loss, (int, float)) and math.isfinite(loss):
        data.loss_smooth.add(when, data.smoother.add(loss))
    data.step_time.add(when, record.get("step_time_s"))
    data.step_memory.add(when, record.get("gpu_mem_gb"))
    data.inner_step.add(when, record.get("inner_step"))


def _take_snapshot(data: Data, when: float, record: Mapping[str, Any]) -> None:
    snapshot = record.get("snapshot") or {}
    data.repo_age.add(when, ((snapshot.get("uploads") or {}).get("repo") or {}).get("age_s"))
    data.goodput.add(when, (snapshot.get("miner") or {}).get("goodput"))
    for rank, row in (snapshot.get("ranks") or {}).items():
        data.rank_work.setdefault(rank, TimeSeries()).add(when, row.get("work_s"))
    rows = (snapshot.get("gpus") or {}).get("gpus") or []
    used = [
        row["memory_used_bytes"] / 1024**3
        for row in rows
        if row.get("memory_used_bytes") is not None
    ]
    busy = [
        100 * row["utilization_ratio"] for row in rows if row.get("utilization_ratio") is not None
    ]
    data.gpu_memory.add(when, min(used, default=None))
    data.gpu_use.add(when, min(busy, default=None))
