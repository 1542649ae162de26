"""What the report shows, gathered from guard.jsonl and status.json in one pass. A week of it in
seconds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from miner_guard import state_dir
from miner_guard.eventlog import query
from miner_guard.eventlog.query import Hit, Query
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
    }
)
_KEPT = 20_000
"""Of the events of one kind the first and at least so many of the newest are kept for the plots and
tables."""

_Kept = tuple[int, float, Hit]
"""The event's number in the log, its time, and itself."""


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


@dataclass(frozen=True)
class Mark:
    """An event at a time."""

    time: float
    event: str
    level: str
    msg: str
    fields: Mapping[str, Any]


@dataclass
class Data:
    """Everything that the report draws."""

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

    def of(self, *events: str) -> list[Mark]:
        """The marks of these events, oldest first."""
        return [mark for mark in self.marks if mark.event in events]


def gather(state: state_dir.StateDir, since: str = "") -> Data:
    """Read the state directory; what is missing or torn is left out."""
    status, costs = state_dir.read_json(state.status), state_dir.read_json(state.costs)
    data = Data(status if isinstance(status, dict) else {})
    data.costs = costs if isinstance(costs, dict) and "operations" in costs else None
    seen, kept = query.Seen(), dict[str, list[_Kept]]()
    for hit in query.search(state.log, Query(since=since), seen):
        _take(data, hit, kept)
    data.unreadable += seen.unreadable
    for _, time, hit in sorted(each for of_kind in kept.values() for each in of_kind):
        data.marks.append(Mark(time, hit.event, hit.level, hit.msg, json.loads(hit.raw)))
    return data


def _take(data: Data, hit: Hit, kept: dict[str, list[_Kept]]) -> None:
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
        of_kind = kept.setdefault(hit.event, [])
        of_kind.append((data.counts.total(), time, hit))
        if len(of_kind) > 2 * _KEPT:
            # The first stays: it tells since when a milestone is reached.
            del of_kind[1:_KEPT]


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
