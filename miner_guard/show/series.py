"""The page's curves: columns of run.db, thinned to what a screen can show, with the outages to
shade and the moments to mark; and the milestones of source 004."""

from __future__ import annotations

import bisect
import functools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from miner_guard.config import GateSettings
from miner_guard.record.store import RunReader, StoredEvent
from miner_guard.system.clock import iso_utc, parse_iso_utc

_POINTS = 600
"""Points of a curve on the page. Each group of measurements keeps its smallest and its largest."""

_SNAPSHOTS = 1200
"""Health snapshots that the page reads; a longer window reads evenly fewer of them."""

_GAP_FACTOR = 20
"""A gap this many times the usual interval between points breaks the line: nothing was measured."""

_OFF_AXIS_FACTOR = 2.0
"""The axis leaves out a first step that takes this many times as long as any other: it includes
compiling and loading, and would flatten the rest of the curve."""

_DECAY = 0.5 ** (1 / 10)
"""The smoothed loss gives a value half its weight after 10 steps."""

_GIB = 1024**3

_OF_STEP = ("$.loss", "$.step_time_s", "$.gpu_mem_gb", "$.inner_step")
_OF_SNAPSHOT = ("$.snapshot.uploads.repo.age_s", "$.snapshot.gpus.gpus", "$.snapshot.ranks")

Points = Sequence[tuple[Any, ...]]
"""Rows of a time and its values, oldest first."""

Span = tuple[float, float]


@dataclass(frozen=True)
class Window:
    """The time that the page shows, in seconds since 1970; None: from the first event, or to the
    last."""

    start: float | None = None
    end: float | None = None

    @property
    def since(self) -> str:
        return "" if self.start is None else iso_utc(self.start)

    @property
    def until(self) -> str:
        return "" if self.end is None else iso_utc(self.end)


@dataclass(frozen=True)
class Curve:
    """One plot, as page.js draws it."""

    title: str
    unit: str
    names: Sequence[str]
    columns: Sequence[Sequence[float | None]]
    """The times, then the values of each line; a None breaks the lines."""

    zero: bool = True
    """Whether the axis begins at 0."""

    limit: float | None = None
    top: float | None = None
    """The largest value on the axis, where a first step exceeds it."""

    marks: Sequence[tuple[str, str, Sequence[float]]] = ()
    """Times to mark, with their colour and words."""


@dataclass
class Record:
    """What the record holds of a window: steps, snapshots, and the events worth a mark."""

    window: Window
    marks: Sequence[StoredEvent]
    steps: Points = ()
    """Time, loss, step time (s), GPU memory (GB), inner step."""

    snapshots: Points = ()
    """Time, repo age (s), and as JSON the GPUs and the ranks."""

    end: float = 0.0
    """The last moment of the window."""

    @classmethod
    def read(cls, record: RunReader, window: Window, marks: Sequence[StoredEvent]) -> Record:
        """Read a window of the record."""
        since, until = window.since, window.until
        steps = record.columns("inner_step", _OF_STEP, since=since, until=until)
        every = 1 + record.counts(since, until).get("health_snapshot", 0) // _SNAPSHOTS
        snapshots = record.columns(
            "health_snapshot", _OF_SNAPSHOT, since=since, until=until, every=every
        )
        last = max((row[0] for row in [*steps[-1:], *snapshots[-1:]]), default=0.0)
        last = max([last, *(parse_iso_utc(mark.ts) for mark in marks[-1:])])
        return cls(window, marks, steps, snapshots, last)

    @functools.cached_property
    def times(self) -> list[float]:
        """Of the steps."""
        return [row[0] for row in self.steps]

    @functools.cached_property
    def losses(self) -> Points:
        return _column(self.steps, 1)

    @functools.cached_property
    def step_times(self) -> Points:
        return _column(self.steps, 2)

    @functools.cached_property
    def memory(self) -> Points:
        """The GPUs' memory as NVML or, without it, the steps say."""
        return _of_gpus(self.snapshots)[0] or _column(self.steps, 3)

    def of(self, *names: str) -> list[StoredEvent]:
        return [mark for mark in self.marks if mark.name in names]

    def times_of(self, *names: str) -> list[float]:
        """When these events came."""
        return [parse_iso_utc(mark.ts) for mark in self.of(*names)]

    def next_of(self, times: Sequence[float], time: float) -> float:
        """The first of the times after `time`, or else the window's end."""
        place = bisect.bisect_right(times, time)
        return times[place] if place < len(times) else max(self.end, time)


def curves(run: Record, gate: GateSettings) -> list[Curve]:
    """The curves that have values, most important first."""
    breaks = run.times_of("miner_exited", "miner_restarting")
    losses = [
        (time, loss, smooth)
        for (time, loss), smooth in zip(run.losses, _smoothed(run.losses), strict=True)
    ]
    took = run.step_times
    repo = _column(run.snapshots, 1)
    busy = _of_gpus(run.snapshots)[1]
    spikes = run.times_of("loss_spike", "loss_divergence")
    fates = [
        ("good", "verified", run.times_of("upload_succeeded")),
        ("bad", "failed", run.times_of("upload_failed")),
    ]
    repo = repo or [(time, 0.0) for _, _, times in fates for time in times]
    ranks, names = _work_of_ranks(run.snapshots)
    limit = gate.repo_age_limit_s
    charts = [
        Curve(
            "Loss",
            "",
            ("loss", "smoothed"),
            thinned(losses, breaks),
            zero=False,
            marks=[("bad", "spike or divergence", spikes)],
        ),
        Curve(
            "Step time",
            "s",
            ("step time",),
            thinned(took, breaks),
            top=_top(run, took),
            marks=[("warn", "slow step", run.times_of("slow_step"))],
        ),
        Curve("Repo age", "s", ("repo age",), thinned(sorted(repo)), limit=limit, marks=fates),
        Curve("GPU memory", "GB (lowest GPU)", ("GPU memory",), thinned(run.memory)),
        Curve("GPU use", "% (lowest GPU)", ("GPU use",), thinned(busy)),
    ]
    if len(names) > 1:
        title = "Own work by rank"
        charts.insert(2, Curve(title, "s per step, without waiting", names, thinned(ranks)))
    return [curve for curve in charts if curve.columns]


def _is_number(value: Any) -> bool:
    return type(value) is float or type(value) is int


def _column(rows: Points, place: int) -> Points:
    return [(row[0], row[place]) for row in rows if _is_number(row[place])]


def _smoothed(rows: Points) -> Iterable[float]:
    """An exponential moving average, debiased as in TensorBoard: the first value, usually the
    highest loss of a run, gets no extra weight."""
    total = weight = 0.0
    for row in rows:
        total = _DECAY * total + (1 - _DECAY) * row[1]
        weight = _DECAY * weight + (1 - _DECAY)
        yield total / weight


def _of_gpus(snapshots: Points) -> tuple[Points, Points]:
    """The least memory used (GB) and the lowest use (%) of any GPU."""
    memory: list[tuple[float, float]] = []
    busy: list[tuple[float, float]] = []
    for row in snapshots:
        gpus = json.loads(row[2] or "[]")
        for points, key, factor in (
            (memory, "memory_used_bytes", 1 / _GIB),
            (busy, "utilization_ratio", 100.0),
        ):
            values = [factor * gpu[key] for gpu in gpus if _is_number(gpu.get(key))]
            if values:
                points.append((row[0], min(values)))
    return memory, busy


def _work_of_ranks(snapshots: Points) -> tuple[Points, Sequence[str]]:
    """Each rank's own work, one column a rank, and their names."""
    tables = [(row[0], json.loads(row[3] or "{}")) for row in snapshots]
    ranks = sorted({rank for _, table in tables for rank in table}, key=int)
    rows = [(time, *(table.get(r, {}).get("work_s") for r in ranks)) for time, table in tables]
    return [row for row in rows if len(row) > 2 and _is_number(row[1])], [
        f"rank {rank}" for rank in ranks
    ]


def _top(run: Record, took: Points) -> float | None:
    firsts = {run.next_of(run.times, start) for start in run.times_of("miner_started")}
    firsts |= {row[0] for row in took[:1]}
    others = max((value for time, value in took if time not in firsts), default=0.0)
    first = max((value for time, value in took if time in firsts), default=0.0)
    return others if first > _OFF_AXIS_FACTOR * others > 0 else None


def thinned(rows: Points, breaks: Sequence[float] = ()) -> list[list[float | None]]:
    """The times and the columns of values to draw. A group of rows keeps those with the smallest
    and the largest first value; a row of None stands where nothing was measured, or at one of
    `breaks` (in order), such as a restart."""
    if not rows:
        return []
    size = max(1, 2 * len(rows) // _POINTS)
    chosen: list[tuple[Any, ...]] = []
    for start in range(0, len(rows), size):
        group = rows[start : start + size]
        extremes = {min(group, key=itemgetter(1)), max(group, key=itemgetter(1))}
        chosen += sorted(extremes, key=itemgetter(0))
    usual = (rows[-1][0] - rows[0][0]) / max(1, len(chosen) - 1)
    drawn: list[tuple[Any, ...]] = []
    for row in chosen:
        before = drawn[-1][0] if drawn else row[0]
        broken = bisect.bisect(breaks, before) != bisect.bisect(breaks, row[0])
        if broken or row[0] - before > _GAP_FACTOR * usual:
            drawn.append(((before + row[0]) / 2, *[None] * (len(row) - 1)))
        drawn.append(row)
    times, *columns = zip(*drawn, strict=True)
    return [
        [round(time, 1) for time in times],
        *([_short(value) for value in column] for column in columns),
    ]


def _short(value: Any) -> float | None:
    return float(f"{value:.5g}") if _is_number(value) else None


def outages(run: Record) -> dict[str, Sequence[Span]]:
    """The spans to shade, by kind: `hang`, `restart`, `NaN` and `blocked by the gate`."""
    exits, losses = run.times_of("miner_exited", "miner_restarting"), [row[0] for row in run.losses]
    hangs = []
    for mark in run.of("hang_detected"):
        time, silent_s = parse_iso_utc(mark.ts), float(mark.fields.get("idle_s") or 0.0)
        hangs.append((time - silent_s, min(run.next_of(run.times, time), run.next_of(exits, time))))
    blocks = [parse_iso_utc(m.ts) for m in run.of("upload_blocked") if m.level != "info"]
    allowed = run.times_of("upload_allowed", "upload_succeeded")
    others = {
        "restart": (exits, run.times),
        "NaN": (run.times_of("loss_nan"), losses),
        "blocked by the gate": (blocks, allowed),
    }
    spans: dict[str, Sequence[Span]] = {"hang": hangs}
    for kind, (starts, ends) in others.items():
        spans[kind] = _joined((time, run.next_of(ends, time)) for time in starts)
    return spans


def _joined(spans: Iterable[Span]) -> list[Span]:
    """The spans, without those that begin inside an earlier one."""
    joined: list[Span] = []
    for span in spans:
        if not joined or span[0] > joined[-1][1]:
            joined.append(span)
    return joined


_STEP_S = 30.0
_MEMORY_GB = 10.0
_STILL_S = 3600.0


def milestones(run: Record, gate: GateSettings) -> list[dict[str, Any]]:
    """The milestones of source 004 that the guard can see, of a whole run: `stage`, `title`, and
    when it was `reached` (seconds since 1970), or `why` not. Scores and ranks are the validators'
    to know."""
    least, limit = gate.min_inner_step, gate.repo_age_limit_s
    reports = [mark for mark in run.of("gpu_diagnostics") if mark.fields.get("ranks")]
    ranks = reports[-1].fields["ranks"] if reports else [{}]
    cuda = all(rank.get("cuda_available") for rank in ranks)
    on_gpu = all(str(rank.get("model_device")).startswith("cuda") for rank in ranks)
    reported = parse_iso_utc(reports[-1].ts) if reports else None
    why = "the GPU diagnostics show otherwise" if reports else "no GPU diagnostics in the log"
    done = run.times_of("upload_succeeded")
    allowed = run.times_of("upload_allowed") or done
    trained = _first(_column(run.steps, 4), lambda v: v >= least)
    blocked = [mark for mark in run.of("upload_blocked") if mark.level != "info"]
    slow = run.times_of("slow_step")
    quiet = (slow[-1] if slow else run.times[0] if run.times else math.inf) + _STILL_S
    young = _first(_column(run.snapshots, 1), lambda v: v < limit)
    quietly = quiet if quiet <= run.end else None
    unblocked = run.end if trained is not None and not blocked else None
    why_blocked = f"{len(blocked)} blocked" if blocked else "inner step not reached yet"
    roomy = _first(run.memory, lambda v: v > _MEMORY_GB)
    falls = run.end if _falls(run) else None
    quick = _first(run.step_times, lambda v: v < _STEP_S)
    first, upload, regular = "Hour 0-1", "Hour 1-2", "Hour 2-6"
    rows: Sequence[tuple[str, str, float | None, str]] = (
        (first, "GPU diagnostics show CUDA available", reported if cuda else None, why),
        (first, "Model on GPU", reported if on_gpu else None, why),
        (first, "Step time < 30 seconds", quick, "no"),
        (first, "GPU memory > 10 GB", roomy, "no"),
        (upload, f"Inner step reaches {least}+", trained, "not yet"),
        (upload, "Upload validation passes", next(iter(allowed), None), "none allowed"),
        (upload, "First gradient verified", next(iter(done), None), "none verified yet"),
        (upload, f"Repo age < {limit:.0f} seconds", young, "never below the limit so far"),
        (regular, "Uploads regularly", next(iter(done[2:3]), None), f"{len(done)} so far"),
        (regular, "Loss decreasing", falls, "it is not"),
        (regular, 'No "SLOW STEP" for an hour', quietly, f"{len(slow)} so far"),
        (regular, f'No "UPLOAD BLOCKED" from inner step {least} on', unblocked, why_blocked),
    )
    return [dict(zip(("stage", "title", "reached", "why"), row, strict=True)) for row in rows]


def _first(rows: Points, true: Callable[[float], bool]) -> float | None:
    return next((time for time, value in rows if true(value)), None)


def _falls(run: Record) -> bool:
    """Whether the last tenth of the losses is lower than the first, and the last one a number."""
    losses = [loss for _, loss in run.losses]
    if len(losses) < 20 or not _is_number(run.steps[-1][1]):
        return False
    tenth = len(losses) // 10
    return bool(sum(losses[-tenth:]) < sum(losses[:tenth]))
