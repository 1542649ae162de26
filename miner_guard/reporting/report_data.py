"""The report's data, read from guard.jsonl and status.json: a week in seconds, afterwards only new
lines."""

from __future__ import annotations

import bisect
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from miner_guard import state_dir
from miner_guard.eventlog.query import Follower, Hit, Query, Seen
from miner_guard.system.clock import parse_iso_utc

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
        "verdict_changed",
    }
)
_KEPT = 20_000
"""For each kind of event, the first and at least this many of the newest are kept for plots and
tables."""

_MAX_POINTS = 200_000
"""Maximum points of a series. Beyond it the older half is thinned; a year of steps stays in
memory."""


@dataclass
class TimeSeries:
    """Values over time: seconds since 1970 and the value, in order."""

    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, time: float, value: Any) -> None:
        """Append a number; anything else is a gap."""
        if isinstance(value, (int, float)) and value == value:
            self.times.append(time)
            self.values.append(float(value))
            if len(self.times) > _MAX_POINTS:
                self._thin_older_half()

    def since(self, time: float) -> TimeSeries:
        """The values from `time` on."""
        start = bisect.bisect_left(self.times, time)
        return TimeSeries(self.times[start:], self.values[start:]) if start else self

    def _thin_older_half(self) -> None:
        """Keep the smallest and the largest of each eight old points: no extreme is lost."""
        half = len(self.times) // 2
        times: list[float] = []
        values: list[float] = []
        for start in range(0, half, 8):
            group = range(start, min(start + 8, half))
            ends = {
                min(group, key=self.values.__getitem__),
                max(group, key=self.values.__getitem__),
            }
            for place in sorted(ends):
                times.append(self.times[place])
                values.append(self.values[place])
        self.times[:half], self.values[:half] = times, values


@dataclass(frozen=True)
class Mark:
    """An event with its time."""

    time: float
    event: str
    level: str
    msg: str
    fields: Mapping[str, Any]


@dataclass
class Data:
    """All data that the report draws."""

    status: Mapping[str, Any]
    loss: TimeSeries = field(default_factory=TimeSeries)
    step_time: TimeSeries = field(default_factory=TimeSeries)
    step_memory: TimeSeries = field(default_factory=TimeSeries)
    inner_step: TimeSeries = field(default_factory=TimeSeries)
    repo_age: TimeSeries = field(default_factory=TimeSeries)
    gpu_use: TimeSeries = field(default_factory=TimeSeries)
    gpu_memory: TimeSeries = field(default_factory=TimeSeries)
    goodput: TimeSeries = field(default_factory=TimeSeries)
    monitoring: TimeSeries = field(default_factory=TimeSeries)
    marks: list[Mark] = field(default_factory=list)
    """Oldest first."""

    counts: Counter[str] = field(default_factory=Counter)
    first: float | None = None
    last: float | None = None
    unreadable: int = 0
    host: str = ""
    costs: Mapping[str, Any] | None = None

    def window(self, since: float) -> Data:
        """The same run from `since` (seconds since 1970) on; counts cover the window."""
        series = {
            f.name: getattr(self, f.name).since(since)
            for f in fields(self)
            if isinstance(getattr(self, f.name), TimeSeries)
        }
        marks = [mark for mark in self.marks if mark.time >= since]
        first = None if self.first is None else max(self.first, since)
        counts = Counter(mark.event for mark in marks)
        return replace(self, **series, marks=marks, first=first, counts=counts)

    def of(self, *events: str) -> list[Mark]:
        """The marks of these events, oldest first."""
        return [mark for mark in self.marks if mark.event in events]


class LogReader:
    """The data of a state directory, kept up to date by reading only new lines."""

    def __init__(self, state: state_dir.StateDir, since: str = "") -> None:
        self._state = state
        self._follower = Follower(state.log, Query(since=since))
        self._data: Data | None = None

    def refresh(self) -> Data:
        """The current data, without missing or torn input. For one thread at a time."""
        seen = Seen()
        if self._data is None:
            self._data = Data({})
            hits: Iterable[Hit] = self._follower.past(seen)
        else:
            hits = self._follower.poll()
        for hit in hits:
            _take(self._data, hit)
        self._data.unreadable += seen.unreadable
        status, costs = (state_dir.read_json(p) for p in (self._state.status, self._state.costs))
        self._data.status = status if isinstance(status, dict) else {}
        self._data.costs = costs if isinstance(costs, dict) and "operations" in costs else None
        return self._data

    def close(self) -> None:
        """Close the log."""
        self._follower.close()


def gather(state: state_dir.StateDir, since: str = "") -> Data:
    """Read the state directory once, leaving out missing or torn input."""
    reader = LogReader(state, since)
    try:
        return reader.refresh()
    finally:
        reader.close()


def _take(data: Data, hit: Hit) -> None:
    data.counts[hit.event] += 1
    try:
        time = parse_iso_utc(hit.ts)
    except ValueError:
        data.unreadable += 1
        return
    data.first = time if data.first is None else min(data.first, time)
    data.last = time if data.last is None else max(data.last, time)
    if hit.event == _STEP:
        _take_step(data, time, json.loads(hit.raw))
    elif hit.event == _SNAPSHOT:
        _take_snapshot(data, time, json.loads(hit.raw))
    elif hit.event in _MARKS:
        data.marks.append(Mark(time, hit.event, hit.level, hit.msg, json.loads(hit.raw)))
        if data.counts[hit.event] % _KEPT == 0 and data.counts[hit.event] > _KEPT:
            _forget(data, hit.event)


def _forget(data: Data, event: str) -> None:
    """Drop old marks of one kind; keep the first, which dates a milestone."""
    of_kind = [place for place, mark in enumerate(data.marks) if mark.event == event]
    dropped = set(of_kind[1:-_KEPT])
    data.marks = [mark for place, mark in enumerate(data.marks) if place not in dropped]


def _take_step(data: Data, time: float, record: Mapping[str, Any]) -> None:
    data.host = str(record.get("host") or data.host)
    data.loss.add(time, record.get("loss"))
    data.step_time.add(time, record.get("step_time_s"))
    data.step_memory.add(time, record.get("gpu_mem_gb"))
    data.inner_step.add(time, record.get("inner_step"))


def _take_snapshot(data: Data, time: float, record: Mapping[str, Any]) -> None:
    data.host = str(record.get("host") or data.host)
    snapshot = record.get("snapshot") or {}
    data.repo_age.add(time, ((snapshot.get("uploads") or {}).get("repo") or {}).get("age_s"))
    data.goodput.add(time, (snapshot.get("miner") or {}).get("goodput"))
    data.monitoring.add(time, (snapshot.get("costs") or {}).get("share_pct"))
    rows = (snapshot.get("gpus") or {}).get("gpus") or []
    used = [
        row["memory_used_bytes"] / 1024**3
        for row in rows
        if row.get("memory_used_bytes") is not None
    ]
    busy = [
        100 * row["utilization_ratio"] for row in rows if row.get("utilization_ratio") is not None
    ]
    data.gpu_memory.add(time, min(used, default=None))
    data.gpu_use.add(time, min(busy, default=None))
