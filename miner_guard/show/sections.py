"""The sections of the report: state, tiles, tables, milestones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from html import escape
from typing import Any

from miner_guard.config import GateSettings
from miner_guard.record.status_document import RankSteps, StatusDocument
from miner_guard.record.words import percentages
from miner_guard.show.data import Data, Mark
from miner_guard.show.runbook import rows as runbook_rows
from miner_guard.watch.state_words import (
    BRIEF_SHARE,
    CELLS,
    GREEN,
    GREY,
    RED,
    SHARE_WORDS,
    UNWATCHED,
    YELLOW,
    Strip,
    freshness,
    is_live,
    now_of,
    read_state,
    share_words,
    span,
    state_since,
    time_of_reading,
    week_of,
)

_KINDS = {GREEN: "good", YELLOW: "warn", RED: "bad", GREY: "idle", UNWATCHED: "none"}
"""CSS class of each colour."""

_APART = 0.11
"""Share of the strip's width that an axis label needs on a phone."""

_CELLS_ACROSS = 24
"""Number of cells that fill the page's width. If there are more, they are narrower; if fewer, the
strip has no axis."""

_HOURS_LABELLED = 36
"""The axis shows times for up to this many hours, and dates for longer records."""


def about(data: Data, title: str) -> str:
    """A line with the run and state that the page shows, and their times."""
    now = now_of(data.status)
    words = [title, f"run {data.status.run_id or 'unknown'}"]
    words.append(f"miner {read_state(data.status).life}")
    first, last = when(data.first), when(data.last)
    if first[:10] == last[:10] == when(now)[:10]:
        first, last = first[11:], last[11:]
    words.append("no events" if data.first is None else f"log {first} to {last} UTC")
    made = "" if now is None else f"<b>{when(now)} UTC</b> · "
    return f"<p class='about'>{made}{escape(' · '.join(words))}</p>"


def verdict(data: Data) -> str:
    """The four answers: what the run does, since when, why, and what to do."""
    state = read_state(data.status)
    step = inline(state.next_step or "nothing")
    row = f" <small>(runbook: {runbook_link(state.event)})</small>" if state.event else ""
    kind = _KINDS[state.colour or GREY]
    age = freshness(data.status)
    old = f" <small>({escape(age)})</small>" if age else ""
    return (
        f'<section class="verdict {kind}" aria-label="State">'
        f"<h1>{escape(state_since(state, time_of_reading(data.status)))}{old}</h1><dl>"
        f"<dt>Why</dt><dd>{escape(str(state.cause))}</dd>"
        f"<dt>Next step</dt><dd>{step}{row}</dd></dl></section>"
    )


def strip(data: Data) -> str:
    """Up to a week of states, laid out like a status page, with dates and a legend."""
    week = week_of(data.status, CELLS)
    if week is None:
        return ""
    cells = []
    for place, state in enumerate(week.cells):
        start = when(week.start + place * week.cell_s)[:16]
        cells.append(f'<i class="{_KINDS[state]}" title="{start} UTC: {SHARE_WORDS[state]}"></i>')
    words = share_words(week)
    # A short record gets a short strip, so that a cell does not look like half a day.
    width = min(1.0, len(cells) / _CELLS_ACROSS)
    places = "".join(
        f'<span style="left:{100 * where:.1f}%">{escape(text)}</span>'
        for where, text in (_labels(week) if width == 1.0 else ())
    )
    axis = f'{places}<span class="now">now</span>' if places else ""
    keys = "".join(
        f'<span><i class="{kind}"></i>{SHARE_WORDS[colour]}</span>'
        for colour, kind in _KINDS.items()
    )
    brief = span(BRIEF_SHARE * week.cell_s)
    how = (
        f"Each cell covers {span(week.cell_s)} and shows the worst state that held for {brief} "
        "or longer; the last cell also shows the present state. The record "
        f"begins at {when(week.since)[:16]} UTC."
    )
    return (
        f'<section class="week" aria-label="States, {escape(words.partition(":")[0])}">'
        f'<div class="strip" style="width:{100 * width:.1f}%" role="img" '
        f'aria-label="States, {escape(words)}">{"".join(cells)}</div>'
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


_OVERDUE_S = 60.0
_OVERDUE_FACTOR = 4.0
"""The last step's figures are out of date if the step is older than both `_OVERDUE_S` seconds and
this multiple of the longest step."""

_GIB = 1024**3


@dataclass(frozen=True)
class Tile:
    """One figure. `kind` is the CSS class of its colour: `bad`, `warn` or empty."""

    name: str
    value: str | None
    """None if unknown."""

    kind: str = ""
    note: str = ""
    """The limit, the age, or an explanation."""

    stale: bool = False
    """True if the figure is out of date."""


def tiles(data: Data, gate: GateSettings) -> str:
    """All tiles; those of a silent guard are stale."""
    shown = [*_steps(data), *_life(data), *_uploads(data, gate), *_machine(data)]
    live = is_live(data.status)
    if not live:
        shown = [replace(tile, stale=True) for tile in shown]
    updated = (data.status.updated or "")[:19].replace("T", " ")
    words = "" if live else f"<p class='none'>As of {updated} UTC, when the guard last wrote:</p>"
    cells = "".join(_drawn(tile) for tile in shown)
    return f'<section aria-label="Figures">{words}<div class="tiles">{cells}</div></section>'


def _drawn(tile: Tile) -> str:
    note = f"<small>{escape(tile.note)}</small>" if tile.note else ""
    return (
        f'<div class="tile{" old" if tile.stale else ""}">'
        f'<b class="{tile.kind}">{escape(tile.value or "unknown")}</b>'
        f"<span>{escape(tile.name)}</span>{note}</div>"
    )


def _steps(data: Data) -> Iterator[Tile]:
    steps = data.status.steps
    # A non-finite loss appears as a word in the status, and not in the curve.
    word = steps.loss if isinstance(steps.loss, str) else None
    age = steps.last_step_age_s
    overdue = age is not None and age > max(_OVERDUE_S, _OVERDUE_FACTOR * (steps.max_s or 0.0))
    stale = overdue or data.status.state != "running"
    ago = "" if age is None else f"last one {span(age)} ago"
    yield Tile("steps", number(steps.steps, ",.0f"), "", ago, stale)
    note = "not a number" if word else "first → last shown"
    yield Tile("loss", _loss(data, word), "bad" if word else "", note, stale)
    grade = f"grade: {steps.grade}" if steps.grade else ""
    poor = "warn" if steps.grade == "bad" else ""
    yield Tile("step p50 / p95", _pair(steps.p50_s, steps.p95_s), poor, grade, stale)
    slow = data.counts["slow_step"]
    yield Tile("slow steps", str(slow), "warn" if slow else "", _last(data, "slow_step"))


def _life(data: Data) -> Iterator[Tile]:
    goodput = percentages(data.status.steps.goodput)
    lost = {name: data.status.steps.goodput[name] for name in goodput if name != "training"}
    most = max(lost, key=lambda name: lost[name], default=None)
    note = "" if most is None else f"{most.replace('_', ' ')} {goodput[most]}"
    yield Tile("goodput", goodput.get("training"), "", note)
    for name, event in (("hangs", "hang_detected"), ("restarts", "miner_restarting")):
        count = data.counts[event]
        yield Tile(name, str(count), "warn" if count else "", _last(data, event))


def _uploads(data: Data, gate: GateSettings) -> Iterator[Tile]:
    repo = data.status.uploads.repo
    limit = gate.repo_age_limit_s if repo.limit_s is None else repo.limit_s
    kind = "bad" if repo.stale else "warn" if repo.due else ""
    yield Tile("repo age", number(repo.age_s, ",.0f", " s"), kind, f"limit {limit:,.0f} s")
    verified, failed = data.counts["upload_succeeded"], data.counts["upload_failed"]
    last = _last(data, "upload_succeeded")
    note = f"{failed} failed" + (f", {last}" if last else "")
    yield Tile("uploads verified", str(verified), "bad" if failed else "", note)
    least = gate.min_inner_step
    early = sum(is_early(mark, gate) for mark in data.of("upload_blocked"))
    blocked = data.counts["upload_blocked"] - early
    # A block below the minimum inner step is normal in every outer step.
    note = f"and {early} before inner step {least}" if early else ""
    yield Tile("uploads blocked", str(blocked), "warn" if blocked else "", note)


def _machine(data: Data) -> Iterator[Tile]:
    health, verdict = data.status.health, data.status.verdict
    key = None if verdict is None else verdict.key
    gpus = health.gpus.gpus
    well = sum(row.get("state") == "ok" for row in gpus)
    if gpus:
        yield Tile("GPUs ok", f"{well} of {len(gpus)}", "" if well == len(gpus) else "bad")
    elif health.gpus.state in ("absent", "ok"):
        yield Tile("GPUs", "none", "bad" if key == "cpu_fallback" else "", "NVML reports none")
    else:
        yield Tile("GPUs", None)
    folders = health.host.get("disk_free_by_folder_bytes") or {}
    free = health.host.get("disk_free_bytes")
    fullest = min(folders, key=lambda name: folders[name], default="")
    size = (
        None if free is None else number(free / _GIB, ",.0f" if free > 10 * _GIB else ".1f", " GB")
    )
    yield Tile("disk free", size, "bad" if key == "disk" else "", fullest and f"disk of {fullest}")
    costs = data.costs or {}
    over = costs.get("budget_status", "ok") != "ok"
    budget = number(costs.get("budget_percentage"), "g", " %")
    yield Tile(
        "monitoring",
        number(costs.get("total_percentage"), ".2f", " %"),
        "bad" if over else "",
        f"budget {budget}" if budget else "",
    )
    incentive = data.status.chain.incentive
    note = "" if incentive is not None else data.status.chain.reason or "no chain is configured"
    yield Tile("incentive", number(incentive, ".4f"), "", note[:40])


def _last(data: Data, event: str) -> str:
    """The time of the newest of these events; empty if there is none."""
    marks = data.of(event)
    if not marks:
        return ""
    now = now_of(data.status)
    today = now is not None and when(now)[:10] == when(marks[-1].time)[:10]
    return f"last {when(marks[-1].time)[11 if today else 5 : 16]} UTC"


def _loss(data: Data, word: str | None) -> str | None:
    """The first and last loss in the window."""
    if data.first is None or data.last is None or not data.loss:
        return word
    start = data.loss.at(data.first)
    if start is None:
        start = data.loss.first[1] if data.loss.first else None
    end = word or number(data.loss.at(data.last), ".2f")
    return f"{number(start, '.2f')} → {end}"


def _pair(one: float | None, other: float | None) -> str | None:
    a, b = (number(value, ".0f" if (value or 0) >= 10 else ".2g") for value in (one, other))
    return None if a is None or b is None else f"{a} / {b} s"


_WORST = ("critical", "error")
_NUMBER = re.compile(r"[-+.\d]+")
_FIRST_ROWS = 8
"""A table shows this many rows and collapses the rest."""

_TABLE_ROWS = 40
_BEHIND_S = 30.0
"""A rank whose last step is this much older than another rank's is hung or gone: list it first."""

_SIGNS = {"yes": ("good", "reached"), "no": ("warn", "not yet"), "unknown": ("", "unknown")}
_MAX_ALARMS = 1000
"""How many of an event's newest marks to search for repetitions."""

_REPEATED_WITHIN_S = 3600.0
_LEFT_OUT = re.compile(r" \(asked \d+ more times? since the last line\)$")
_FATES = ("upload_succeeded", "upload_failed", "upload_blocked", "audit_failed", "audit_passed")
_ALARMS = (
    "incident",
    "hang_detected",
    "crash_loop",
    "cpu_fallback",
    "repo_stale",
    "straggler",
    "gpu_drop",
    "guard_killed",
)


def when(time: float | None) -> str:
    """Format a time, in seconds since 1970, as date and time in UTC; `-` for None."""
    return "-" if time is None else f"{datetime.fromtimestamp(time, timezone.utc):%F %T}"


def number(value: Any, spec: str, unit: str = "") -> str | None:
    """Format a number with its unit; None for anything else."""
    return f"{value:{spec}}{unit}" if isinstance(value, (int, float)) else None


@dataclass(frozen=True)
class _Row:
    """One row of the table: the newest of `count` similar events, the first of which was at
    `since`."""

    newest: Mark
    count: int
    since: float


def alarms(data: Data, gate: GateSettings) -> str:
    """Incidents and alarms, newest first. Repetitions, as in a crash loop, share a row with a
    count."""
    rows = _grouped(_alarms_of(data, gate))
    return _events("Incidents and alarms", rows[:_TABLE_ROWS])


def _alarms_of(data: Data, gate: GateSettings) -> list[Mark]:
    found = [
        mark
        for event, marks in data.marks.items()
        for mark in marks[-_MAX_ALARMS:]
        if mark.level in _WORST or event in _ALARMS
    ]
    found += [m for m in data.of("upload_blocked")[-_MAX_ALARMS:] if not is_early(m, gate)]
    return sorted(found, key=lambda mark: mark.time)


def is_early(mark: Mark, gate: GateSettings) -> bool:
    """Return whether the gate blocked an upload below the minimum inner step, which is normal in
    every outer step."""
    inner = mark.fields.get("inner_step")
    return isinstance(inner, int) and inner < gate.min_inner_step


def _grouped(marks: Sequence[Mark]) -> list[_Row]:
    """Group `marks`, which are in chronological order, into rows, newest first. Marks that differ
    only in their numbers share a row if each is within `_REPEATED_WITHIN_S` of the next."""
    latest: dict[tuple[str, str], int] = {}
    rows: list[_Row] = []
    for mark in marks:
        key = (mark.event, _NUMBER.sub("", _first_line(mark).lower()))
        place = latest.get(key)
        if place is not None and mark.time - rows[place].newest.time <= _REPEATED_WITHIN_S:
            rows[place] = _Row(mark, rows[place].count + 1, rows[place].since)
        else:
            latest[key] = len(rows)
            rows.append(_Row(mark, 1, mark.time))
    return sorted(rows, key=lambda row: -row.newest.time)


def fates(data: Data) -> str:
    """Uploads and audits as validators see them, newest first."""
    found = data.of(*_FATES)
    rows = [_Row(mark, 1, mark.time) for mark in reversed(found[-_TABLE_ROWS:])]
    return _events("Uploads and audits", rows)


def _events(title: str, rows: Sequence[_Row]) -> str:
    kinds = {"critical": "bad", "error": "bad", "warning": "warn"}
    cells = [
        f'<tr><td class="when">{when(row.newest.time)}</td>'
        f'<td class="event {kinds.get(row.newest.level, "")}">{runbook_link(row.newest.event)}</td>'
        f"<td>{escape(_first_line(row.newest))}{_count(row)}</td></tr>"
        for row in rows
    ]
    return _table(title, _head("when (UTC)", "event", "what"), cells, "log")


def _first_line(mark: Mark) -> str:
    first = mark.msg.partition("\n")[0]
    # The log counts the blocks that it left out; a row counts the ones that it merges.
    return _LEFT_OUT.sub("", first) if mark.event == "upload_blocked" else first


def _count(row: _Row) -> str:
    if row.count == 1:
        return ""
    return f" <small>{row.count} times since {when(row.since)[11:]}</small>"


def runbook_link(event: str) -> str:
    """A link to the event's row in the runbook on the same page."""
    text = escape(event)
    return f'<a href="#runbook-{event}">{text}</a>' if event in runbook_rows() else text


def runbook(data: Data, gate: GateSettings) -> str:
    """The runbook's rows for the events on the page, the state's event first, so that the page is
    useful even if nothing else is reachable."""
    state = read_state(data.status)
    events = [state.event] if state.event else []
    events += [mark.event for mark in reversed(_alarms_of(data, gate))]
    events += [event for event in _FATES if data.marks.get(event)]
    rows = [
        f'<tr id="runbook-{event}"><td class="event">{event}</td>'
        f"<td>{inline(row.meaning)}</td><td>{inline(row.action)}</td></tr>"
        for event in dict.fromkeys(events)
        if (row := runbook_rows().get(event)) is not None
    ]
    if not rows:
        return ""
    title = "Runbook: what to do about these events"
    head = _head("event", "what it means", "what to do")
    return f"<h2>{title}</h2>{_scrolling(title, head, rows, 'runbook')}"


def inline(text: str) -> str:
    """Format a cell of the runbook; text between backticks becomes code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def _head(*columns: str) -> str:
    """A row of headings; a trailing `#` marks a column of numbers."""
    cells = [
        f'<th scope="col" class="n">{escape(name[:-1])}</th>'
        if name.endswith("#")
        else f'<th scope="col">{escape(name)}</th>'
        for name in columns
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _table(title: str, head: str, rows: Sequence[str], kind: str) -> str:
    """A titled table; rows beyond the first few are collapsed."""
    if not rows:
        return f"<h2>{escape(title)}</h2><p class='none'>none</p>"
    table = f"<h2>{escape(title)}</h2>{_scrolling(title, head, rows[:_FIRST_ROWS], kind)}"
    if not (further := rows[_FIRST_ROWS:]):
        return table
    return (
        f"{table}<details><summary>{escape(title)}: {len(further)} more</summary>"
        f"{_scrolling(title + ', more', head, further, kind)}</details>"
    )


def _scrolling(title: str, head: str, rows: Sequence[str], kind: str) -> str:
    """A table in a box that scrolls sideways on a phone and can be scrolled with the keyboard."""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(title)}">'
        f'<table class="{kind}">{head}{"".join(rows)}</table></div>'
    )


def pushes(rows: Sequence[Mapping[str, Any]]) -> str:
    """The outcome of each push, from the ledger, which keeps pushes longer than the log keeps
    lines."""
    kinds = {"verified": "good", "failed": "bad", "refuted": "bad"}
    cells = [
        f'<tr><td class="when">{when(row["wall"])}</td>'
        f"<td>{escape(str(row['tag'] or 'unknown'))}</td>"
        f'<td class="{kinds.get(row["outcome"], "warn")}">{escape(str(row["outcome"]))}</td>'
        f'<td class="n">{escape(number(row["bytes"], ",.0f") or "unknown")}</td>'
        f'<td class="n">{escape(number(row["seconds"], ".1f", " s") or "unknown")}</td>'
        f'<td class="n">{escape(number(row["attempts"], ".0f") or "unknown")}</td>'
        f"<td>{escape(str(row['checksum'] or 'unknown')[:12])}</td>"
        f"<td>{escape(str(row['error'] or ''))}</td></tr>"
        for row in reversed(rows[-_TABLE_ROWS:])
    ]
    columns = ("when (UTC)", "tag", "outcome", "gradients, bytes#", "took#", "attempts#")
    head = _head(*columns, "checksum", "why")
    return _table("Upload history", head, cells, "costs")


def ranks(status: StatusDocument) -> str:
    """The ranks, slowest first, so that a lagging rank is easy to spot among sixteen."""
    rows = list(status.steps.per_rank.items())
    if not rows:
        return ""
    youngest = min(_known(row.last_step_age_s) for _, row in rows)
    rows.sort(key=lambda item: (-_behind_s(item[1], youngest), -_own_s(item[1])))
    usual = sorted(_own_s(row) for _, row in rows)[len(rows) // 2]
    cells = [
        f'<tr><td>{escape(rank)}</td><td class="n {_lag(_own_s(row), usual)}">'
        f"{number(row.work_s, '.2f', ' s') or 'unknown'}</td>"
        f'<td class="n">{number(row.step_time_s, ".2f", " s") or "unknown"}</td>'
        f'<td class="n">{number(row.last_step_age_s, ",.0f", " s") or "unknown"}</td>'
        f'<td class="n">{number(row.gpu_mem_gb, ".1f", " GB") or "unknown"}</td></tr>'
        for rank, row in rows
    ]
    head = _head("rank", "own work#", "last step took#", "last step ago#", "GPU memory#")
    return _table("Ranks, slowest first", head, cells, "narrow")


def _known(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _behind_s(row: RankSteps, youngest_s: float) -> float:
    """Seconds by which the rank's last step lags behind the others'; 0 within the usual spread."""
    behind = _known(row.last_step_age_s) - youngest_s
    return behind if behind > _BEHIND_S else 0.0


def _own_s(row: RankSteps) -> float:
    return row.work_s or 0.0


def _lag(own_s: float, usual_s: float) -> str:
    return "warn" if own_s > 1.2 * usual_s > 0 else ""


def gpus(status: StatusDocument) -> str:
    """The GPUs: those with a fault first, then by use, lowest first."""
    rows = [row for row in status.health.gpus.gpus if row]
    if not rows:
        return f"<h2>GPUs</h2><p class='none'>{escape(status.health.without_gpu())}</p>"
    rows.sort(key=lambda row: (row.get("state") == "ok", _known(row.get("utilization_ratio"))))
    cells = [
        f"<tr><td>{escape(str(row.get('index')))}</td>"
        f'<td class="{"good" if row.get("state") == "ok" else "bad"}">'
        f"{escape(str(row.get('state')))}</td>"
        f'<td class="n">{_percent(row.get("utilization_ratio"))}</td>'
        f'<td class="n">{_gib(row.get("memory_used_bytes"))} of '
        f"{_gib(row.get('memory_total_bytes'))}</td>"
        f'<td class="n">{number(row.get("temperature_c"), ".0f", " °C") or "unknown"}</td>'
        f'<td class="n">{number(row.get("power_w"), ".0f", " W") or "unknown"}</td></tr>'
        for row in rows
    ]
    head = _head("GPU", "state", "use#", "memory#", "temperature#", "power#")
    return _table("GPUs, worst first", head, cells, "narrow")


def _percent(ratio: Any) -> str:
    return f"{100 * ratio:.0f}%" if isinstance(ratio, (int, float)) else "unknown"


def _gib(size_bytes: Any) -> str:
    return f"{size_bytes / _GIB:.1f} GB" if isinstance(size_bytes, (int, float)) else "unknown"


def costs(data: Data) -> str:
    """The cost ledger, most expensive first."""
    if data.costs is None:
        return "<h2>What monitoring costs</h2><p class='none'>no ledger yet</p>"
    operations = sorted(
        data.costs["operations"].items(), key=lambda row: (-row[1]["total_time"], row[0])
    )
    rows = [
        f'<tr><td>{escape(name)}</td><td class="n">{row["calls"]}</td>'
        f'<td class="n">{row["total_time"]:.2f} s</td>'
        f'<td class="n">{row["background_time"]:.2f} s</td>'
        f'<td class="n">{row["percentage"]:.3f}%</td>'
        f"<td>{escape(row['impact'])}</td><td>{escape(row['status'])}</td></tr>"
        for name, row in operations[:_TABLE_ROWS]
    ]
    columns = ("operation", "calls#", "blocking time#", "background CPU#", "share#")
    head = _head(*columns, "impact", "status")
    share, budget = data.costs["total_percentage"], data.costs["budget_percentage"]
    title = f"What monitoring costs: {share:.2f}% of training time (budget {budget:g}%)"
    return _table(title, head, rows, "costs")


def milestone_table(data: Data, gate: GateSettings) -> str:
    """The milestones table, collapsed."""
    rows: list[str] = []
    stage = ""
    for milestone in milestones(data, gate):
        if milestone.stage != stage:
            stage = milestone.stage
            rows.append(
                f'<tr class="stage"><th scope="rowgroup" colspan="3">{escape(stage)}</th></tr>'
            )
        kind, word = _SIGNS[milestone.state]
        detail = when(milestone.reached) if milestone.reached is not None else milestone.reason
        cells = f'<td>{escape(milestone.title)}</td><td class="state {kind}">{word}</td>'
        rows.append(f'<tr>{cells}<td class="why">{escape(detail)}</td></tr>')
    head = _head("milestone", "state", "when (UTC), or why not")
    table = _scrolling("Milestones", head, rows, "milestones")
    return f"<details><summary>Milestones</summary>{table}</details>"


_UNREADABLE = "only validators know"
_STEP_S = 30.0
_MEMORY_GB = 10.0
_STILL_S = 3600.0


@dataclass(frozen=True)
class Milestone:
    """One line of the timeline. `reached`: when, in seconds since 1970; if None, `reason` says
    why."""

    stage: str
    title: str
    reached: float | None
    state: str
    """`yes`, `no` or `unknown`."""

    reason: str


def milestones(data: Data, gate: GateSettings) -> list[Milestone]:
    """All milestones, in the order of source 004."""
    return [*_diagnosis(data), *_first_upload(data, gate), *_regular(data, gate), *_validators()]


def _at(stage: str, title: str, time: float | None, otherwise: str) -> Milestone:
    return Milestone(
        stage, title, time, "no" if time is None else "yes", "" if time is not None else otherwise
    )


def _diagnosis(data: Data) -> list[Milestone]:
    stage = "Hour 0-1: diagnosis"
    reports = [mark for mark in data.of("gpu_diagnostics") if mark.fields.get("ranks")]
    ranks = reports[-1].fields["ranks"] if reports else []
    when = reports[-1].time if reports else None
    cuda = bool(ranks) and all(rank.get("cuda_available") for rank in ranks)
    on_gpu = bool(ranks) and all(str(rank.get("model_device")).startswith("cuda") for rank in ranks)
    no_report = (
        "no GPU diagnostics in the log" if not reports else "the GPU diagnostics show otherwise"
    )
    memory = data.step_memory or data.gpu_memory
    return [
        _at(stage, "GPU diagnostics show CUDA available", when if cuda else None, no_report),
        _at(stage, "Model on GPU", when if on_gpu else None, no_report),
        _at(
            stage,
            "Step time < 30 seconds",
            data.step_time.first_time(lambda v: v < _STEP_S),
            "no such step yet",
        ),
        _at(stage, "GPU memory > 10 GB", memory.first_time(lambda v: v > _MEMORY_GB), "not seen"),
    ]


def _first_upload(data: Data, gate: GateSettings) -> list[Milestone]:
    stage = "Hour 1-2: first valid upload"
    required = gate.min_inner_step
    done, allowed = data.of("upload_succeeded"), data.of("upload_allowed")
    fresh = data.repo_age.first_time(lambda v: v < gate.repo_age_limit_s)
    return [
        _at(
            stage,
            f"Inner step reaches {required}+",
            data.inner_step.first_time(lambda v: v >= required),
            "not yet",
        ),
        _at(stage, "Upload validation passes", _time(allowed or done), "no upload allowed yet"),
        _at(stage, "First gradient uploaded and verified", _time(done), "no upload verified yet"),
        _at(
            stage,
            f"Repo age < {gate.repo_age_limit_s:.0f} seconds",
            fresh,
            "never below the limit so far",
        ),
    ]


def _time(marks: list[Mark]) -> float | None:
    return marks[0].time if marks else None


def _regular(data: Data, gate: GateSettings) -> list[Milestone]:
    stage = "Hour 2-6: regular uploads"
    done = data.of("upload_succeeded")
    losses = [loss for _, loss in data.loss.window(data.first or 0.0, data.last or 0.0)]
    tenth = max(1, len(losses) // 10)
    falls = len(losses) >= 20 and sum(losses[-tenth:]) / tenth < sum(losses[:tenth]) / tenth
    blocked = [
        mark
        for mark in data.of("upload_blocked")
        if (mark.fields.get("inner_step") or 0) >= gate.min_inner_step
    ]
    slow = [mark for mark in data.of("slow_step") if mark.level != "debug"]
    end = data.last
    got_there = data.inner_step.first_time(lambda v: v >= gate.min_inner_step) is not None
    return [
        _at(
            stage,
            "Uploads regularly",
            done[2].time if len(done) > 2 else None,
            f"{len(done)} verified so far",
        ),
        _at(
            stage,
            "Loss decreasing over time",
            end if falls else None,
            "the loss is not decreasing, or there are too few steps",
        ),
        _quiet(data, stage, 'No "SLOW STEP" warnings for an hour', slow),
        _at(
            stage,
            f'No "UPLOAD BLOCKED" from inner step {gate.min_inner_step} on',
            end if got_there and not blocked else None,
            f"{len(blocked)} blocked" if blocked else "inner step not reached yet",
        ),
    ]


def _quiet(data: Data, stage: str, title: str, marks: list[Mark]) -> Milestone:
    """A milestone reached after an hour without any of `marks`."""
    if data.first is None or data.last is None:
        return _at(stage, title, None, "no data")
    since = (marks[-1].time if marks else data.first) + _STILL_S
    return _at(
        stage,
        title,
        since if since <= data.last else None,
        f"{len(marks)} so far; no quiet hour yet",
    )


def _validators() -> list[Milestone]:
    rows = {
        "Hour 6-12: first validations": (
            "Validators download the gradients",
            "First score updates",
            "Train Random > 10",
            "Rank improves",
        ),
        "Day 1-2: score improvement": (
            "Train Random 20-40",
            "Train Assigned > 0.3",
            "Rank < 15",
            "Consistent validations",
        ),
        "Week 1: competitive": (
            "Train Random 40-60",
            "Train Assigned > 0.5",
            "Rank < 10",
            "AllReduce participation > 80%",
        ),
    }
    return [
        Milestone(stage, title, None, "unknown", _UNREADABLE)
        for stage, titles in rows.items()
        for title in titles
    ]
