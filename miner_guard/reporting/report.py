"""The report: one self-contained HTML page of a run, for a file or live from the HTTP port."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from miner_guard import state_dir
from miner_guard.config import GateSettings
from miner_guard.detectors.verdict_history import CELLS, NO_DATA
from miner_guard.detectors.verdict_wording import (
    miner_state,
    now_of,
    share_words,
    shown,
    state_since,
    time_of_reading,
    week_of,
)
from miner_guard.eventlog.catalog import counted
from miner_guard.eventlog.formatters import percentages
from miner_guard.eventlog.rendering import visible
from miner_guard.reporting import report_tables as tables
from miner_guard.reporting.report_curves import curves
from miner_guard.reporting.report_data import Data, gather
from miner_guard.reporting.report_tables import number, when

_COLOURS = {
    "training": "#2e8b57",
    "monitoring": "#c77c11",
    "upload": "#2563a8",
    "allreduce": "#6a51a3",
    "data": "#5aa5b5",
    "load_state": "#8d99ae",
    "pause": "#b8b8b8",
    "init": "#7a869a",
    "restart": "#b3261e",
    "hang": "#7f1d1d",
}
_VERDICTS = {"earning": "good", "degraded": "warn", "not earning": "bad", "stopped": "bad"}
_AS_ASKED = ("finished", "done", "paused")
"""Keys of verdicts that are no fault: an operator asked for the state, or the miner finished."""


def render(
    state: state_dir.StateDir,
    *,
    gate: GateSettings | None = None,
    since: str = "",
    pushes: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The page as a standalone file. `since`: omit events before this ISO time.

    `pushes`: the uploads in the ledger, oldest first.
    """
    data, gate = gather(state, since), gate or GateSettings()
    title = title_of(data, state)
    content = body(title, data, data, gate, pushes=pushes, plots=curves(data, gate))
    return page(title, f"<main>{content}</main><script>{template('chart.js')}</script>")


def template(name: str) -> str:
    """One of the files under `templates/`."""
    return (resources.files("miner_guard.reporting") / "templates" / name).read_text(
        encoding="utf-8"
    )


def title_of(data: Data, state: state_dir.StateDir) -> str:
    """The page's title: the miner's host, else the name of the state directory."""
    return f"miner-guard: {data.host or state.root.name}"


def page(title: str, content: str) -> str:
    """A whole HTML document around `content`."""
    return visible(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{template('report.css')}</style></head><body>{content}</body></html>\n"
    )


def body(
    title: str,
    data: Data,
    whole: Data,
    gate: GateSettings,
    *,
    pushes: Sequence[Mapping[str, Any]],
    plots: str,
) -> str:
    """The page's sections, those that on-call needs most urgently first. `data`: the window to
    show; `whole`: the whole run, for the verdict, the week and the milestones; `plots`: the drawn
    curves."""
    return "\n".join(
        [
            _about(data, title),
            _verdict(whole),
            _strip(whole),
            tables.alarms(data),
            _tiles(data),
            tables.fates(data),
            tables.pushes(pushes),
            tables.ranks(data.status),
            tables.gpus(data.status),
            plots,
            _goodput(data),
            tables.costs(data),
            tables.milestone_table(whole, gate),
            tables.runbook(data),
            _foot(data),
        ]
    )


def _verdict(data: Data) -> str:
    """Four answers: whether the miner is earning, since when, what is wrong, what to do."""
    verdict = shown(data.status, data.status_age_s)
    state = str(verdict.state or "unknown")
    step = str(verdict.next_step or "nothing")
    event, confidence = verdict.event, verdict.confidence
    row = f" <small>(runbook: {tables.runbook_link(event)})</small>" if event else ""
    sure = f" <small>({escape(str(confidence))})</small>" if confidence else ""
    # A run that ended on request is stopped, but nothing is wrong with it.
    asked = verdict.key in _AS_ASKED
    name = "What happened" if asked else "What it does" if state == "earning" else "What is wrong"
    kind = "" if asked else _VERDICTS.get(state, "")
    since = state_since(verdict, time_of_reading(data.status, data.status_age_s))
    return (
        f'<section class="verdict {kind}" aria-label="Verdict">'
        f"<h1>{escape(since)}</h1><dl>"
        f"<dt>{name}</dt><dd>{escape(str(verdict.cause))}{sure}</dd>"
        f"<dt>Next step</dt><dd>{escape(step)}{row}</dd></dl></section>"
    )


def _strip(data: Data) -> str:
    """A week of verdicts, like a status page."""
    week = week_of(data.status, data.status_age_s, CELLS)
    if week is None:
        return ""
    cells = []
    for place, state in enumerate(week.cells):
        kind = "none" if state == NO_DATA else _VERDICTS.get(state, "unknown")
        start = when(week.start + place * week.cell_s)[:16]
        cells.append(f'<i class="{kind}" title="{start} UTC: {escape(state)}"></i>')
    words = share_words(week)
    return (
        f'<section class="week" aria-label="The last 7 days">'
        f'<div class="strip" role="img" aria-label="Last 7 days: {escape(words)}">{"".join(cells)}'
        f"</div><small>last 7 days: {escape(words)}</small></section>"
    )


def _about(data: Data, title: str) -> str:
    """Which run and state the page shows, and as of when."""
    now = now_of(data.status, data.status_age_s)
    words = [title, f"run {data.status.run_id or 'unknown'}"]
    words.append(f"miner {miner_state(data.status, data.status_age_s)}")
    words.append(
        "no events" if data.first is None else f"log {when(data.first)} to {when(data.last)} UTC"
    )
    made = "" if now is None else f"<b>{when(now)} UTC</b> · "
    return f"<p class='about'>{made}{escape(' · '.join(words))}</p>"


def _tiles(data: Data) -> str:
    steps, repo = data.status.steps, data.status.uploads.repo
    # A non-finite loss appears as a word in the status, and not in the curve.
    word = steps.loss if isinstance(steps.loss, str) else None
    slow, restarts = data.counts["slow_step"], data.counts["miner_restarting"]
    share, failed = (data.costs or {}).get("total_percentage"), data.counts["upload_failed"]
    tiles = [
        ("steps", number(steps.steps, ",.0f"), ""),
        ("loss", _loss(data, word), "bad" if word else ""),
        ("step p50 / p95", _pair(steps.p50_s, steps.p95_s), ""),
        ("slow steps", str(slow), "warn" if slow else ""),
        ("goodput", percentages(steps.goodput).get("training"), ""),
        ("repo age", number(repo.age_s, ",.0f", " s"), "bad" if repo.stale else ""),
        ("uploads verified", str(data.counts["upload_succeeded"]), ""),
        ("uploads failed", str(failed), "bad" if failed else ""),
        ("uploads blocked", str(data.counts["upload_blocked"]), ""),
        ("restarts", str(restarts), "warn" if restarts else ""),
        ("monitoring", number(share, ".2f", " %"), "bad" if _over(data) else ""),
        ("validators' score", _score(data), ""),
    ]
    cells = "".join(
        f'<div class="tile"><b class="{kind}">{escape(value or "unknown")}</b>'
        f"<span>{escape(name)}</span></div>"
        for name, value, kind in tiles
    )
    return f'<section class="tiles" aria-label="Figures">{cells}</section>'


def _loss(data: Data, word: str | None) -> str | None:
    """The first and the last loss of the window."""
    if data.first is None or data.last is None or not data.loss:
        return word
    start = data.loss.at(data.first)
    if start is None:
        start = data.loss.first[1] if data.loss.first else None
    end = word or number(data.loss.at(data.last), ".2f")
    return f"{number(start, '.2f')} → {end}"


def _score(data: Data) -> str | None:
    """The incentive on the chain: the only part of the validators' score that the guard can
    read."""
    return number(data.status.chain.incentive, ".4f", " incentive")


def _over(data: Data) -> bool:
    return data.costs is not None and data.costs["budget_status"] != "ok"


def _pair(one: Any, other: Any) -> str | None:
    a, b = (number(value, ".0f" if (value or 0) >= 10 else ".2g") for value in (one, other))
    return None if a is None or b is None else f"{a} / {b} s"


def _goodput(data: Data) -> str:
    shares = {k: float(v) for k, v in data.status.steps.goodput.items() if v > 0}
    if not shares:
        return "<h2>Where the time went</h2><p class='none'>unknown: no steps yet</p>"
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    percent = percentages(shares)
    colour = {name: _COLOURS.get(name, "#8d99ae") for name in shares}
    bars = "".join(
        f'<i style="width:{100 * v:.2f}%;background:{colour[k]}" title="{escape(k)}"></i>'
        for k, v in ordered
    )
    keys = "".join(
        f'<span><i style="background:{colour[k]}"></i>{escape(_of(k, share))}</span>'
        for k, share in percent.items()
    )
    return (
        f'<h2>Where the time went</h2><div class="bar">{bars}</div><div class="legend">{keys}</div>'
    )


def _of(name: str, share: str) -> str:
    return f"{name.replace('_', ' ')} {share}"


def _foot(data: Data) -> str:
    total = sum(data.counts.values())
    torn = f", {counted(data.unreadable, 'unreadable line')} skipped" if data.unreadable else ""
    words = (
        f"{counted(total, 'event')} read{torn}. Scores come from validators; "
        "miner-guard does not estimate them."
    )
    return f"<p><small>{escape(words)}</small></p>"
