"""The report's header: which run it shows, the verdict, and the strip of verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from html import escape

from miner_guard.reporting import report_tables as tables
from miner_guard.reporting.report_data import Data
from miner_guard.reporting.report_tables import when
from miner_guard.watch.state import (
    BRIEF_SHARE,
    CELLS,
    DEGRADED,
    EARNING,
    NOT_EARNING,
    STOPPED,
    UNKNOWN,
    UNWATCHED,
    Strip,
    miner_state,
    now_of,
    share_words,
    shown,
    span,
    state_since,
    time_of_reading,
    week_of,
)

_KINDS = {
    EARNING: "good",
    DEGRADED: "warn",
    NOT_EARNING: "bad",
    STOPPED: "bad",
    UNKNOWN: "unknown",
    UNWATCHED: "none",
}
"""CSS class of each state's colour."""

_LEGEND = {
    "good": "earning",
    "warn": "degraded",
    "bad": "not earning, or stopped",
    "unknown": "unknown",
    "none": "unwatched: no guard ran",
}
_AS_ASKED = ("finished", "done", "paused")
"""Keys of verdicts that report no fault: an operator requested the state, or the miner finished."""

_APART = 0.11
"""Share of the strip's width that an axis label needs on a phone."""

_CELLS_ACROSS = 24
"""Number of cells that fill the page's width. If there are more, they are narrower; if fewer, the
strip has no axis."""

_HOURS_LABELLED = 36
"""The axis shows times for up to this many hours, and dates for longer records."""


def about(data: Data, title: str) -> str:
    """A line with the run and state that the page shows, and their times."""
    now = now_of(data.status, data.status_age_s)
    words = [title, f"run {data.status.run_id or 'unknown'}"]
    words.append(f"miner {miner_state(data.status, data.status_age_s)}")
    first, last = when(data.first), when(data.last)
    if first[:10] == last[:10] == when(now)[:10]:
        first, last = first[11:], last[11:]
    words.append("no events" if data.first is None else f"log {first} to {last} UTC")
    made = "" if now is None else f"<b>{when(now)} UTC</b> · "
    return f"<p class='about'>{made}{escape(' · '.join(words))}</p>"


def verdict(data: Data) -> str:
    """The verdict's four answers: whether the miner is earning, since when, what is wrong, and
    what to do."""
    verdict = shown(data.status, data.status_age_s)
    state = str(verdict.state or UNKNOWN)
    step = tables.inline(str(verdict.next_step or "nothing"))
    event, confidence = verdict.event, verdict.confidence
    row = f" <small>(runbook: {tables.runbook_link(event)})</small>" if event else ""
    sure = f" <small>(confidence: {escape(str(confidence))})</small>" if confidence else ""
    # A run that ended on request is stopped, but nothing is wrong with it.
    asked = verdict.key in _AS_ASKED
    name = "What happened" if asked else "What it does" if state == EARNING else "What is wrong"
    kind = "" if asked else _KINDS.get(state, "")
    since = state_since(verdict, time_of_reading(data.status, data.status_age_s))
    return (
        f'<section class="verdict {kind}" aria-label="Verdict">'
        f"<h1>{escape(since)}</h1><dl>"
        f"<dt>{name}</dt><dd>{escape(str(verdict.cause))}{sure}</dd>"
        f"<dt>Next step</dt><dd>{step}{row}</dd></dl></section>"
    )


def strip(data: Data) -> str:
    """Up to a week of verdicts, laid out like a status page, with dates and a legend."""
    week = week_of(data.status, data.status_age_s, CELLS)
    if week is None:
        return ""
    cells = []
    for place, state in enumerate(week.cells):
        start = when(week.start + place * week.cell_s)[:16]
        cells.append(f'<i class="{_KINDS[state]}" title="{start} UTC: {escape(state)}"></i>')
    words = share_words(week)
    # A short record gets a short strip, so that a cell does not look like half a day.
    width = min(1.0, len(cells) / _CELLS_ACROSS)
    places = "".join(
        f'<span style="left:{100 * where:.1f}%">{escape(text)}</span>'
        for where, text in (_labels(week) if width == 1.0 else ())
    )
    axis = f'{places}<span class="now">now</span>' if places else ""
    keys = "".join(
        f'<span><i class="{kind}"></i>{escape(text)}</span>' for kind, text in _LEGEND.items()
    )
    brief = span(BRIEF_SHARE * week.cell_s)
    how = (
        f"Each cell covers {span(week.cell_s)} and shows the worst verdict that held for {brief} "
        "or longer (unknown only if it held for most of the cell); the last cell also shows the "
        "current verdict. The record "
        f"begins at {when(week.since)[:16]} UTC."
    )
    return (
        f'<section class="week" aria-label="Verdicts, {escape(words.partition(":")[0])}">'
        f'<div class="strip" style="width:{100 * width:.1f}%" role="img" '
        f'aria-label="Verdicts, {escape(words)}">{"".join(cells)}</div>'
        f'<div class="axis" aria-hidden="true">{axis}</div>'
        f'<small>{escape(words)}</small><div class="legend">{keys}<span>{how}</span></div>'
        "</section>"
    )


def _labels(week: Strip) -> Iterator[tuple[float, str]]:
    """Times below the strip, in UTC: where the record begins, then the cells' starts or the days,
    as many as fit. Each label has a position from 0 to 1."""
    in_days = week.end - week.since > 3600 * _HOURS_LABELLED
    taken = 0.0
    for place in range(len(week.cells)):
        where = place / len(week.cells)
        moment = _utc(week.start + place * week.cell_s)
        begins_day = moment.hour < week.cell_s / 3600
        if place == 0:
            moment = _utc(week.since)
        elif not taken + _APART <= where <= 1 - _APART or (in_days and not begins_day):
            continue
        taken = where
        dated = in_days or (place > 0 and begins_day)
        yield where, f"{moment:%b} {moment.day}" if dated else f"{moment:%H:%M}"


def _utc(time: float) -> datetime:
    return datetime.fromtimestamp(time, timezone.utc)
