"""The report's tables: incidents, uploads, ranks, GPUs, costs, milestones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from typing import Any

from miner_guard.config import GateSettings
from miner_guard.eventlog.status_document import RankSteps, StatusDocument
from miner_guard.reporting.report_data import Data, Mark
from miner_guard.reporting.report_milestones import milestones

_WORST = ("critical", "error")
_FIRST_ROWS = 8
"""Rows shown at once; the rest of a table is folded."""

_TABLE_ROWS = 40
_BEHIND_S = 30.0
"""A rank whose last step is this much older than another's hangs or is gone: it is shown first."""

_GIB = 1024**3
_SIGNS = {"yes": ("good", "reached"), "no": ("warn", "not yet"), "unknown": ("", "unknown")}
_ALARMS = (
    "incident",
    "hang_detected",
    "crash_loop",
    "cpu_fallback",
    "repo_stale",
    "straggler",
    "gpu_drop",
)


def when(time: float | None) -> str:
    """A time of day in UTC, with its date."""
    return (
        "-"
        if time is None
        else datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    )


def number(value: Any, spec: str, unit: str = "") -> str | None:
    """A figure with its unit; None for anything but a number."""
    return f"{value:{spec}}{unit}" if isinstance(value, (int, float)) else None


def alarms(data: Data) -> str:
    """Incidents and alarms, newest first."""
    found = [
        mark
        for event, marks in data.marks.items()
        for mark in marks[-_TABLE_ROWS:]
        if mark.level in _WORST or event in _ALARMS
    ]
    found.sort(key=lambda mark: mark.time)
    return _events("Incidents and alarms", found[-_TABLE_ROWS:])


def fates(data: Data) -> str:
    """Uploads and audits as validators see them, newest first."""
    found = data.of(
        "upload_succeeded", "upload_failed", "upload_blocked", "audit_failed", "audit_passed"
    )
    return _events("Uploads and audits", found[-_TABLE_ROWS:])


def _events(title: str, marks: Sequence[Mark]) -> str:
    kinds = {"critical": "bad", "error": "bad", "warning": "warn"}
    rows = [
        f'<tr><td class="when">{when(mark.time)}</td>'
        f'<td class="event {kinds.get(mark.level, "")}">{escape(mark.event)}</td>'
        f"<td>{escape(mark.msg.partition(chr(10))[0])}</td></tr>"
        for mark in reversed(marks)
    ]
    head = _head("when (UTC)", "event", "what")
    return _table(title, head, rows, "log")


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
    """A titled table; rows beyond the first few are folded."""
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
    """A table in a box that scrolls sideways on a phone, by keyboard too."""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(title)}">'
        f'<table class="{kind}">{head}{"".join(rows)}</table></div>'
    )


def pushes(rows: Sequence[Mapping[str, Any]]) -> str:
    """The outcome of each push, from the ledger: it keeps pushes longer than the log keeps
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
    head = _head("when (UTC)", "tag", "outcome", "gradients, bytes#", "took#", "attempts#")
    head = head.replace("</tr>", _head("checksum", "why").removeprefix("<tr>"))
    return _table("Upload history", head, cells, "costs")


def ranks(status: StatusDocument) -> str:
    """The ranks, slowest first: of sixteen, the one that lags must be the first."""
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
    """Seconds by which the rank's last step lags behind the others'; 0 within the usual scatter."""
    behind = _known(row.last_step_age_s) - youngest_s
    return behind if behind > _BEHIND_S else 0.0


def _own_s(row: RankSteps) -> float:
    return row.work_s or 0.0


def _lag(own_s: float, usual_s: float) -> str:
    return "warn" if own_s > 1.2 * usual_s > 0 else ""


def gpus(status: StatusDocument) -> str:
    """The GPUs: those with a fault first, then the least used."""
    rows = [row for row in status.health.gpus.gpus if row]
    if not rows:
        return ""
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
    head = _head("operation", "calls#", "blocking time#", "background CPU#", "share#")
    head = head.replace("</tr>", _head("impact", "status").removeprefix("<tr>"))
    share, budget = data.costs["total_percentage"], data.costs["budget_percentage"]
    title = f"What monitoring costs: {share:.2f}% of training time (budget {budget:g}%)"
    return _table(title, head, rows, "costs")


def milestone_table(data: Data, gate: GateSettings) -> str:
    """The milestones, folded."""
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
