"""The report's curves, drawn as SVG."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape

from miner_guard.config import GateSettings
from miner_guard.show.data import Data, TimeSeries

WIDTH, HEIGHT = 1000, 220
_TICK = 16
"""Height of an upload's mark, in the plot's units."""

_COLUMNS = 500
"""Columns of a single-line plot; each column shows at most its minimum and maximum."""

_MIN_COLUMNS = 60
_GAP_FACTOR = 20
"""A gap this many times the usual interval between points breaks the line: nothing was measured."""

_OFF_AXIS_FACTOR = 2.0
"""The axis leaves out a first step that takes this many times as long as any other: it includes
compiling and loading, and would flatten the rest of the curve."""

Scale = Callable[[float], float]
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One line of a plot. `kind` is a CSS class, empty for the plain line."""

    words: str
    series: TimeSeries
    kind: str = ""


@dataclass(frozen=True)
class Dots:
    """Points to mark. `kind` is a CSS class: `bad`, `warn`, `good`."""

    kind: str
    words: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Bands:
    """Time ranges to shade over the full height, in seconds since 1970."""

    kind: str
    words: str
    spans: Sequence[Point]


@dataclass(frozen=True)
class EventLines:
    """Times to mark with a tick at the bottom of the plot."""

    kind: str
    words: str
    times: Sequence[float]


@dataclass(frozen=True)
class Plot:
    """One plot, with everything drawn on it."""

    title: str
    unit: str
    lines: Sequence[Line]
    dots: Sequence[Dots] = ()
    ticks: Sequence[EventLines] = ()
    bands: Sequence[Bands] = ()
    limit: float | None = None
    zero: bool = True
    """True if the axis starts at 0."""

    breaks: Sequence[float] = ()
    """Times, in order, at which lines break: a restart leaves a gap in the measurements."""

    off_axis: Sequence[float] = ()
    """Times of values that may exceed the axis: the first step of each launch."""

    nothing: str = "no data"
    """Text to show if there are no values to draw."""


def draw(plot: Plot, first: float, last: float) -> str:
    """The plot as a `<figure>` from `first` to `last`, in seconds since 1970; shows a note if it
    has no values."""
    columns = max(_MIN_COLUMNS, _COLUMNS // max(len(plot.lines), 1))
    drawn = [
        (line, thinned(line.series.window(first, last), (first, last), plot.breaks, columns))
        for line in plot.lines
    ]
    drawn = [(line, points) for line, points in drawn if any(points)]
    if not drawn:
        return (
            f"<figure><figcaption>{escape(plot.title)}</figcaption><p "
            f'class="none">{escape(plot.nothing)}</p></figure>'
        )
    values, beyond = _on_axis(plot, drawn)
    limit = plot.limit if plot.limit is not None and plot.limit < 3 * max(values) else None
    ticks = nice_ticks(
        0.0 if plot.zero else min(values), max(values) if limit is None else max(*values, limit)
    )
    low, high = ticks[0], ticks[-1]
    span = max(last - first, 1e-9)

    def x(time: float) -> float:
        return round(WIDTH * (min(max(time, first), last) - first) / span, 1)

    def y(value: float) -> float:
        return round(HEIGHT * (1 - (min(max(value, low), high) - low) / (high - low)), 2)

    shapes = [f'<path class="grid" d="{"".join(f"M0 {y(tick)}H{WIDTH}" for tick in ticks)}"/>']
    shapes += [_bands(bands, x) for bands in plot.bands if bands.spans]
    shapes += [_ticks(ticks_, x) for ticks_ in plot.ticks if ticks_.times]
    if limit is not None:
        shapes.append(f'<path class="limit" d="M0 {y(limit)}H{WIDTH}"/>')
    shapes += [
        f'<path class="line {line.kind}" data-name="{escape(line.words)}" '
        f'd="{_path(points, x, y)}"/>'
        for line, points in drawn
    ]
    for dots in plot.dots:
        places = "".join(f"M{x(time)} {y(value)}h0" for time, value in dots.points)
        if places:
            shapes.append(f'<path class="dot {dots.kind}" d="{places}"/>')
    described = escape(_described(plot, drawn[0][1]))
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" '
        f'aria-hidden="true">{"".join(shapes)}<path class="cursor" d=""/></svg>'
    )
    labels = "".join(f"<span>{escape(short(tick))}</span>" for tick in reversed(ticks))
    times = "".join(f"<span>{escape(text)}</span>" for text in time_labels(first, last))
    return (
        f"<figure><figcaption>{escape(plot.title)} "
        f"<small>{escape(plot.unit)}</small>{_legend(plot, drawn, limit, beyond)}</figcaption>"
        f'<div class="plot"><div class="y" aria-hidden="true">{labels}</div>'
        f'<div class="area" tabindex="0" role="img" aria-label="{described}" '
        f'data-first="{first:.0f}" data-span="{span:.0f}" data-low="{low:g}" data-high="{high:g}" '
        f'data-unit="{escape(plot.unit.partition(" ")[0])}">{drawing}<output></output></div>'
        f'<div class="x" aria-hidden="true">{times}</div></div></figure>'
    )


def _on_axis(
    plot: Plot, drawn: Sequence[tuple[Line, Sequence[Point | None]]]
) -> tuple[list[float], float | None]:
    """Return the values that must fit on the axis, and the largest value left off the axis (None if
    all of them fit)."""
    values = [point[1] for _, points in drawn for point in points if point is not None]
    values += [value for dots in plot.dots for _, value in dots.points]
    apart = set(plot.off_axis)
    firsts = [
        point[1]
        for _, points in drawn
        for point in points
        if point is not None and point[0] in apart
    ]
    others = list(values)
    for value in firsts:
        others.remove(value)
    if not firsts or not others or max(firsts) <= _OFF_AXIS_FACTOR * max(others):
        return values, None
    return others, max(firsts)


def _legend(
    plot: Plot,
    drawn: Sequence[tuple[Line, Sequence[Point | None]]],
    limit: float | None,
    beyond: float | None,
) -> str:
    marks: list[Dots | EventLines | Bands] = [
        *(d for d in plot.dots if d.points),
        *(v for v in plot.ticks if v.times),
        *(b for b in plot.bands if b.spans),
    ]
    words = [
        f'<span class="key line {line.kind}">{escape(line.words)}</span>'
        for line, _ in (drawn if len(drawn) > 1 else ())
    ]
    words += [
        f'<span class="key {type(mark).__name__.lower()} {mark.kind}">{escape(mark.words)}</span>'
        for mark in marks
    ]
    if plot.limit is not None:
        where = "" if limit is not None else " (above this axis)"
        words.append(f'<span class="key limit">limit {escape(short(plot.limit))}{where}</span>')
    if beyond is not None:
        words.append(
            f'<span class="key note">first step up to {short(beyond)}, off the axis</span>'
        )
    return "".join(words)


def _ticks(lines: EventLines, x: Scale) -> str:
    places = sorted({x(time) for time in lines.times})
    marks = "".join(f"M{place} {HEIGHT}V{HEIGHT - _TICK}" for place in places)
    return f'<path class="vertical {lines.kind}" d="{marks}"/>'


def _bands(bands: Bands, x: Scale) -> str:
    """Draw all spans as one path; merge spans that touch in the plot."""
    merged: list[list[float]] = []
    for start, end in sorted((x(start), x(end)) for start, end in bands.spans):
        right = max(end, start + 1.5)
        if merged and start <= merged[-1][1] + 0.5:
            merged[-1][1] = max(merged[-1][1], right)
        else:
            merged.append([start, right])
    places = "".join(f"M{left} 0H{right:g}V{HEIGHT}H{left}Z" for left, right in merged)
    return f'<path class="band {bands.kind}" d="{places}"/>'


def _described(plot: Plot, points: Sequence[Point | None]) -> str:
    """A description of the plot for screen readers."""
    values = [point[1] for point in points if point is not None]
    words = f"{plot.title}: from {short(values[0])} to {short(values[-1])} {plot.unit}".rstrip()
    words += f", lowest {short(min(values))}, highest {short(max(values))}"
    marks = [(b.words, len(b.spans)) for b in plot.bands]
    marks += [(d.words, len(d.points)) for d in plot.dots]
    marks += [(t.words, len(t.times)) for t in plot.ticks]
    counts = [f"{name} {count} times" for name, count in marks if count]
    return "; ".join([words, *counts])


def _path(points: Sequence[Point | None], x: Scale, y: Scale) -> str:
    words, pen = [], "M"
    for point in points:
        if point is None:
            pen = "M"
            continue
        words.append(f"{pen}{x(point[0]):g} {y(point[1]):g}")
        pen = "L"
    return "".join(words)


def thinned(
    pairs: Sequence[Point], between: Point, breaks: Sequence[float] = (), columns: int = _COLUMNS
) -> list[Point | None]:
    """Points to draw in `columns` columns over the time `between`; None marks a break in the line.
    Thinning keeps the extremes."""
    if not pairs:
        return []
    first, span = between[0], max(between[1] - between[0], 1e-9)
    usual = (pairs[-1][0] - pairs[0][0]) / max(len(pairs) - 1, 1)
    chosen = pairs
    if len(pairs) > 2 * columns:
        chosen = _extremes(pairs, lambda time: int(columns * (time - first) / span))
        usual = max(usual, span / columns)
    points: list[Point | None] = []
    for place, pair in enumerate(chosen):
        before = chosen[place - 1][0]
        broken = bisect.bisect(breaks, before) != bisect.bisect(breaks, pair[0])
        if place and (broken or pair[0] - before > _GAP_FACTOR * usual):
            points.append(None)
        points.append(pair)
    return points


def _extremes(pairs: Sequence[Point], column_of: Callable[[float], int]) -> list[Point]:
    """The first minimum and the first maximum of each column, in chronological order."""
    chosen: list[Point] = []
    column, low, high = None, pairs[0], pairs[0]
    for pair in pairs:
        here = column_of(pair[0])
        if here != column:
            if column is not None:
                chosen += sorted({low, high})
            column, low, high = here, pair, pair
        elif pair[1] < low[1]:
            low = pair
        elif pair[1] > high[1]:
            high = pair
    return [*chosen, *sorted({low, high})]


def nice_ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers that span the range from `low` to `high`, both finite."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    start = math.floor(low / step)
    return [step * number for number in range(start, math.ceil(high / step - 1e-9) + 1)]


def short(value: float) -> str:
    """Format a number for an axis: 15000 becomes `15k`."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            divisor = 1e3 if letter == "k" else limit
            return f"{value / divisor:.3g}{letter}"
    return f"{value:.4g}"


def time_labels(first: float, last: float) -> list[str]:
    """Four equally spaced UTC times, as precise as the span needs."""
    span = last - first
    form = "%H:%M:%S" if span < 600 else "%H:%M" if span < 2 * 86400 else "%b %d %H:%M"
    moments = [first + span * place / 3 for place in range(4)]
    return [datetime.fromtimestamp(moment, timezone.utc).strftime(form) for moment in moments]


_MAX_RANKS = 16


def curves(data: Data, gate: GateSettings) -> str:
    """The plots for a run, or for a window within it."""
    if data.first is None or data.last is None:
        return "<h2>Curves</h2><p class='none'>no events in the log yet</p>"
    goodput = Plot("Goodput", "share of time spent training", [Line("goodput", data.goodput)])
    plots = [*_training(data), _repo_age(data, gate), *_gpus(data), goodput]
    head = (
        '<h2>Curves</h2><p class="none hint">All times in UTC. Hover over a curve for its values; '
        "drag to zoom in, double-click to zoom out; arrow keys move, + and − zoom.</p>"
    )
    return head + "".join(draw(plot, data.first, data.last) for plot in plots)


def _training(data: Data) -> list[Plot]:
    ends = [mark.time for mark in data.of("miner_restarting")]
    slow = [
        (mark.time, float(mark.fields.get("step_time_s") or 0.0)) for mark in data.of("slow_step")
    ]
    strange = [
        (mark.time, data.loss.at(mark.time) or 0.0)
        for mark in data.of("loss_spike", "loss_divergence")
    ]
    outages = [Bands("hang", "hang", _hangs(data)), Bands("restart", "restart", _restarts(data))]
    loss = Plot(
        "Loss",
        "",
        [Line("loss", data.loss, "faint"), Line("smoothed", data.loss_smooth)],
        [Dots("bad", "spike or divergence", strange)],
        bands=[*outages, Bands("nan", "NaN", _not_finite(data))],
        zero=False,
        breaks=ends,
    )
    steps = Plot(
        "Step time",
        "s",
        [Line("step time", data.step_time)],
        [Dots("warn", "slow step", slow)],
        bands=outages,
        breaks=ends,
        off_axis=_first_steps(data),
    )
    ranks = sorted(data.rank_work, key=int)[:_MAX_RANKS]
    by_rank = [
        Line(f"rank {rank}", data.rank_work[rank], f"hue{place}")
        for place, rank in enumerate(ranks)
    ]
    if len(by_rank) < 2:
        return [loss, steps]
    return [
        loss,
        steps,
        Plot("Own work by rank", "s per step, without waiting", by_rank, bands=outages),
    ]


def _repo_age(data: Data, gate: GateSettings) -> Plot:
    fates = [
        EventLines("good", "verified", [mark.time for mark in data.of("upload_succeeded")]),
        EventLines("bad", "failed", [mark.time for mark in data.of("upload_failed")]),
    ]
    age = data.repo_age if data.repo_age else _nothing_over(data, fates)
    blocked = Bands("blocked", "blocked by the gate", _blocked(data))
    limit = gate.repo_age_limit_s
    return Plot("Repo age", "s", [Line("repo age", age)], (), fates, [blocked], limit=limit)


def _gpus(data: Data) -> list[Plot]:
    health = data.status.health
    why = health.unknown.get("gpus") or health.gpus.reason
    nothing = f"no data: {why}" if why else "no data"
    memory = data.gpu_memory if data.gpu_memory else data.step_memory
    return [
        Plot("GPU memory", "GB (lowest GPU)", [Line("GPU memory", memory)], nothing=nothing),
        Plot("GPU use", "% (lowest GPU)", [Line("GPU use", data.gpu_use)], nothing=nothing),
    ]


def _until_next_step(data: Data, starts: Sequence[float]) -> list[tuple[float, float]]:
    """Return the spans from each start to the next step, or to the end of the data."""
    spans: list[tuple[float, float]] = []
    for start in starts:
        end = data.step_time.next_after(start) or data.last or start
        if not spans or start > spans[-1][1]:
            spans.append((start, end))
    return spans


def _hangs(data: Data) -> list[tuple[float, float]]:
    """Return the spans from the first silent second of each hang to the miner's exit or the next
    step."""
    exits = [mark.time for mark in data.of("miner_exited", "miner_restarting")]
    spans = []
    for mark in data.of("hang_detected"):
        silent = float(mark.fields.get("idle_s") or 0.0)
        until = data.step_time.next_after(mark.time) or data.last or mark.time
        until = min([until, *(time for time in exits if time >= mark.time)])
        spans.append((mark.time - silent, until))
    return spans


def _restarts(data: Data) -> list[tuple[float, float]]:
    return _until_next_step(
        data, [mark.time for mark in data.of("miner_exited", "miner_restarting")]
    )


def _not_finite(data: Data) -> list[tuple[float, float]]:
    """Return the spans from each NaN or infinite loss to the next finite one."""
    return [
        (mark.time, data.loss.next_after(mark.time) or data.last or mark.time)
        for mark in data.of("loss_nan")
    ]


def _blocked(data: Data) -> list[tuple[float, float]]:
    """Return the spans from each blocked upload to the next one that the gate allows."""
    allowed = [mark.time for mark in data.of("upload_allowed", "upload_succeeded")]
    spans: list[tuple[float, float]] = []
    place = 0
    for mark in data.of("upload_blocked"):
        if spans and mark.time <= spans[-1][1]:
            continue
        while place < len(allowed) and allowed[place] < mark.time:
            place += 1
        end = allowed[place] if place < len(allowed) else data.last or mark.time
        spans.append((mark.time, end))
    return spans


def _first_steps(data: Data) -> list[float]:
    """The time of the first step of each launch."""
    starts = [mark.time for mark in data.of("miner_started")]
    firsts = [time for start in starts if (time := data.step_time.next_after(start)) is not None]
    return firsts if data.step_time.first is None else [*firsts, data.step_time.first[0]]


def _nothing_over(data: Data, fates: Sequence[EventLines]) -> TimeSeries:
    """A flat line to carry the upload marks if there are uploads but the repo's age was never
    read."""
    flat = TimeSeries()
    if data.first is not None and data.last is not None and any(lines.times for lines in fates):
        flat.add(data.first, 0.0)
        flat.add(data.last, 0.0)
    return flat
