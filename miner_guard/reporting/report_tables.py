"""The report's tables: incidents, uploads, ranks, GPUs, costs, milestones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from typing import Any

from miner_guard.config import GateSettings
from miner_guard.eventlog.status_document import RankSteps, StatusDocument
from miner_guard.reporting.report_data import Data, Mark
from miner_guard.reporting.report_milestones import milestones
from miner_guard.reporting.runbook import rows as runbook_rows
from miner_guard.watch.state import DEGRADED, NOT_EARNING, STOPPED, shown

_WORST = ("critical", "error")
_NUMBER = re.compile(r"[-+.\d]+")
_FIRST_ROWS = 8
"""A table shows this many rows and collapses the rest."""

_TABLE_ROWS = 40
_BEHIND_S = 30.0
"""A rank whose last step is this much older than another rank's is hung or gone: list it first."""

_GIB = 1024**3
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
    verdict = data.status.verdict
    if not rows and verdict is not None and verdict.state in (DEGRADED, NOT_EARNING, STOPPED):
        return (
            "<h2>Incidents and alarms</h2><p class='none'>none in the log; the verdict comes from "
            "the guard's status, which the guard updates even while it cannot write its log</p>"
        )
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
    """The runbook's rows for the events on the page, the verdict's event first, so that the page is
    useful even if nothing else is reachable."""
    verdict = shown(data.status, data.status_age_s)
    events = [verdict.event] if verdict.event else []
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
