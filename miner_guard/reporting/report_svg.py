"""Plots as inline SVG that scale to any width: the drawing stretches, strokes and letters do not.

Axis labels are HTML beside the drawing, so that they keep their size on a phone.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape

from miner_guard.reporting.report_data import TimeSeries

WIDTH, HEIGHT = 1000, 220
_TICK = 16
"""Height of an upload's mark, in the drawing's units."""

_COLUMNS = 500
"""Maximum points of a line: beyond it each column of the drawing shows its minimum and maximum."""

_GAP_FACTOR = 20
"""A pause this many times longer than usual breaks the line: no values were measured there."""


Scale = Callable[[float], float]


@dataclass(frozen=True)
class Dots:
    """Points to mark. `kind` is a CSS class: `bad`, `warn`, `good`."""

    kind: str
    words: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bands:
    """Time ranges to shade over the whole height, seconds since 1970."""

    kind: str
    words: str
    spans: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class EventLines:
    """Times to mark with a tick at the foot of the drawing."""

    kind: str
    words: str
    times: Sequence[float]


@dataclass(frozen=True)
class Plot:
    """One drawing."""

    title: str
    unit: str
    series: TimeSeries
    dots: Sequence[Dots] = ()
    lines: Sequence[EventLines] = ()
    bands: Sequence[Bands] = ()
    limit: float | None = None
    zero: bool = True
    """The axis starts at 0."""

    breaks: Sequence[float] = ()
    """Times, in order, at which the line breaks: a restart leaves a gap in the measurements."""

    nothing: str = "no data"
    """Text in place of a drawing without values."""


def draw(plot: Plot, first: float, last: float) -> str:
    """The plot as a `<figure>` over the time from `first` to `last`; shows a note where there are
    no values."""
    if not plot.series.values:
        return (
            f"<figure><figcaption>{escape(plot.title)}</figcaption><p "
            f'class="none">{escape(plot.nothing)}</p></figure>'
        )
    values = [*plot.series.values, *(value for dots in plot.dots for _, value in dots.points)]
    if plot.limit is not None and plot.limit < 3 * max(values):
        values.append(plot.limit)
    ticks = nice_ticks(0.0 if plot.zero else min(values), max(values))
    low, high = ticks[0], ticks[-1]
    span = max(last - first, 1e-9)

    def x(time: float) -> float:
        return round(WIDTH * (time - first) / span, 1)

    def y(value: float) -> float:
        return round(HEIGHT * (1 - (min(max(value, low), high) - low) / (high - low)), 1)

    shapes = [f'<path class="grid" d="{"".join(f"M0 {y(tick)}H{WIDTH}" for tick in ticks)}"/>']
    shapes += [_band(bands, span, x) for bands in plot.bands for span in bands.spans]
    shapes += [_ticks(lines, x) for lines in plot.lines if lines.times]
    if plot.limit is not None and low <= plot.limit <= high:
        shapes.append(f'<path class="limit" d="M0 {y(plot.limit)}H{WIDTH}"/>')
    points = thinned(plot.series, first, span, plot.breaks)
    shapes.append(f'<path class="line" d="{_path(points, x, y)}"/>')
    for dots in plot.dots:
        places = "".join(f"M{x(time)} {y(value)}h0" for time, value in dots.points)
        if places:
            shapes.append(f'<path class="dot {dots.kind}" d="{places}"/>')
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(_described(plot))}">{"".join(shapes)}</svg>'
    )
    labels = "".join(f"<span>{escape(short(tick))}</span>" for tick in reversed(ticks))
    times = "".join(f"<span>{escape(text)}</span>" for text in time_labels(first, last))
    return (
        f"<figure><figcaption>{escape(plot.title)} "
        f"<small>{escape(plot.unit)}</small>{_legend(plot)}</figcaption>"
        f'<div class="plot"><div class="y">{labels}</div>'
        f'<div class="area" tabindex="0" data-first="{first:.0f}" data-span="{span:.0f}" '
        f'data-unit="{escape(plot.unit.partition(" ")[0])}" data-points="{_values(points, first)}">'
        f"{drawing}<output></output></div>"
        f'<div class="x">{times}</div></div></figure>'
    )


def _legend(plot: Plot) -> str:
    marks: list[Dots | EventLines | Bands] = [
        *(d for d in plot.dots if d.points),
        *(v for v in plot.lines if v.times),
        *(b for b in plot.bands if b.spans),
    ]
    words = [
        f'<span class="key {type(mark).__name__.lower()} {mark.kind}">{escape(mark.words)}</span>'
        for mark in marks
    ]
    if plot.limit is not None:
        words.append(f'<span class="key limit">limit {escape(short(plot.limit))}</span>')
    return "".join(words)


def _ticks(lines: EventLines, x: Scale) -> str:
    places = sorted({x(time) for time in lines.times})
    marks = "".join(f"M{place} {HEIGHT}V{HEIGHT - _TICK}" for place in places)
    return f'<path class="vertical {lines.kind}" d="{marks}"/>'


def _band(bands: Bands, span: tuple[float, float], x: Scale) -> str:
    start, end = x(span[0]), x(span[1])
    width = max(end - start, 1.5)
    return f'<rect class="band {bands.kind}" x="{start}" y="0" width="{width}" height="{HEIGHT}"/>'


def _described(plot: Plot) -> str:
    """A description of the drawing for people who cannot see it."""
    values = plot.series.values
    words = f"{plot.title}: from {short(values[0])} to {short(values[-1])} {plot.unit}".rstrip()
    return f"{words}, lowest {short(min(values))}, highest {short(max(values))}"


def _values(points: Iterable[tuple[float, float] | None], first: float) -> str:
    """`seconds after first:value` of each drawn point, for the script that shows them."""
    return " ".join(f"{p[0] - first:.0f}:{p[1]:.5g}" for p in points if p is not None)


def _path(points: Iterable[tuple[float, float] | None], x: Scale, y: Scale) -> str:
    words, pen = [], "M"
    for point in points:
        if point is None:
            pen = "M"
            continue
        words.append(f"{pen}{x(point[0])} {y(point[1])}")
        pen = "L"
    return "".join(words)


def thinned(
    series: TimeSeries, first: float, span: float, breaks: Sequence[float] = ()
) -> list[tuple[float, float] | None]:
    """Points to draw, None where the line breaks. Thinning keeps the extremes."""
    pairs = list(zip(series.times, series.values, strict=True))
    usual = (pairs[-1][0] - pairs[0][0]) / max(len(pairs) - 1, 1)
    points: list[tuple[float, float] | None] = []
    columns: dict[int, list[tuple[float, float]]] = {}
    if len(pairs) <= 2 * _COLUMNS:
        chosen = pairs
    else:
        for pair in pairs:
            columns.setdefault(int(_COLUMNS * (pair[0] - first) / span), []).append(pair)
        chosen = []
        for column in columns.values():
            extremes = {min(column, key=lambda p: p[1]), max(column, key=lambda p: p[1])}
            chosen += sorted(extremes)
        usual = max(usual, span / _COLUMNS)
    for place, pair in enumerate(chosen):
        before = chosen[place - 1][0]
        broken = bisect.bisect(breaks, before) != bisect.bisect(breaks, pair[0])
        if place and (broken or pair[0] - before > _GAP_FACTOR * usual):
            points.append(None)
        points.append(pair)
    return points


def nice_ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers that enclose `low` to `high`, both finite."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    start = math.floor(low / step)
    return [step * number for number in range(start, math.ceil(high / step - 1e-9) + 1)]


def short(value: float) -> str:
    """A number for an axis: 1500 is 1.5k."""
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
