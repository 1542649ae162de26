"""The report: one self-contained HTML page of a run, for a file or live from the HTTP port."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from importlib import resources
from typing import Any

from miner_guard import state_dir
from miner_guard.config import GateSettings
from miner_guard.detectors.verdict import headline
from miner_guard.eventlog.catalog import counted
from miner_guard.eventlog.rendering import visible
from miner_guard.health.snapshot import part
from miner_guard.reporting.report_data import Data, Mark, TimeSeries, gather
from miner_guard.reporting.report_milestones import milestones
from miner_guard.reporting.report_svg import Bands, Dots, EventLines, Plot, draw

_WORST = ("critical", "error")
_TABLE_ROWS = 40
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
_SIGNS = {"yes": ("good", "reached"), "no": ("warn", "not yet"), "unknown": ("", "unknown")}


def render(
    state: state_dir.StateDir,
    *,
    gate: GateSettings | None = None,
    since: str = "",
    pushes: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The page as a standalone file. `since` leaves out earlier events.

    `pushes`: the ledger's uploads, oldest first.
    """
    data = gather(state, since)
    title = title_of(data, state)
    content = body(data, title, gate=gate or GateSettings(), pushes=pushes)
    return page(title, f"{content}<script>{template('chart.js')}</script>")


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
    data: Data,
    title: str,
    *,
    gate: GateSettings,
    pushes: Sequence[Mapping[str, Any]] = (),
    plots: str | None = None,
) -> str:
    """The page's sections, most urgent for a person on call first. `plots`: already drawn, else
    drawn now."""
    return "\n".join(
        [
            _head(data, title),
            _verdict(data),
            _events("Incidents and alarms", _alarms(data)),
            _tiles(data),
            _events("Uploads and audits", _fates(data)),
            _pushes(pushes),
            curves(data, gate) if plots is None else plots,
            _goodput(data),
            _costs(data),
            _milestones(data, gate),
            _foot(data),
        ]
    )


def _verdict(data: Data) -> str:
    verdict = part(data.status, "verdict")
    state = str(verdict.get("state") or "unknown")
    step, event = verdict.get("next_step"), verdict.get("event")
    advice = f"<p>Next: {escape(str(step))}</p>" if step else ""
    row = f"<p><small>Runbook: {escape(str(event))}</small></p>" if event else ""
    kind = _VERDICTS.get(state, "")
    return (
        f'<section class="verdict {kind}" aria-label="Verdict"><b>{escape(headline(verdict))}</b>'
        f"{advice}{row}</section>"
    )


def _head(data: Data, title: str) -> str:
    state = data.status.get("state")
    span = "no events" if data.first is None else f"{when(data.first)} to {when(data.last)} UTC"
    run = f"run {data.status.get('run_id') or 'unknown'}, miner {state or 'unknown'}"
    return f"<header><h1>{escape(title)}</h1><p>{escape(run)}; {span}</p></header>"


def when(time: float | None) -> str:
    """A time of day in UTC, with its date."""
    return (
        "-"
        if time is None
        else datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    )


def _tiles(data: Data) -> str:
    steps = part(data.status, "steps")
    repo = part(part(data.status, "uploads"), "repo")
    goodput = part(steps, "goodput").get("training")
    losses = data.loss.values
    # A non-finite loss appears as a word in the status, and not in the curve.
    word = steps["loss"] if isinstance(steps.get("loss"), str) else None
    loss = f"{losses[0]:.2f} → {word or f'{losses[-1]:.2f}'}" if losses else word
    slow, restarts = data.counts["slow_step"], data.counts["miner_restarting"]
    share = (data.costs or {}).get("total_percentage")
    tiles = [
        ("steps", _number(steps.get("steps"), ",.0f"), ""),
        ("loss", loss, "bad" if word else ""),
        ("step p50 / p95", _pair(steps.get("p50_s"), steps.get("p95_s")), ""),
        ("slow steps", str(slow), "warn" if slow else ""),
        ("goodput", _number(goodput, ".0%"), ""),
        ("repo age", _number(repo.get("age_s"), ",.0f", " s"), "bad" if repo.get("stale") else ""),
        ("uploads verified", str(data.counts["upload_succeeded"]), ""),
        (
            "uploads failed",
            str(data.counts["upload_failed"]),
            "bad" if data.counts["upload_failed"] else "",
        ),
        ("uploads blocked", str(data.counts["upload_blocked"]), ""),
        ("restarts", str(restarts), "warn" if restarts else ""),
        ("monitoring", _number(share, ".2f", " %"), "bad" if _over(data) else ""),
        ("validators' score", _score(data), ""),
    ]
    cells = "".join(
        (
            '<div class="tile"><b '
            f'class="{kind}">{escape(value or "unknown")}</b><span>{escape(name)}</span></div>'
        )
        for name, value, kind in tiles
    )
    return f'<section class="tiles">{cells}</section>'


def _score(data: Data) -> str | None:
    """The validators' score, as far as the chain shows it."""
    return _number(part(data.status, "chain").get("incentive"), ".4f", " incentive")


def _over(data: Data) -> bool:
    return data.costs is not None and data.costs["budget_status"] != "ok"


def _number(value: Any, spec: str, unit: str = "") -> str | None:
    return f"{value:{spec}}{unit}" if isinstance(value, (int, float)) else None


def _pair(one: Any, other: Any) -> str | None:
    a, b = (_number(value, ".0f" if (value or 0) >= 10 else ".2g") for value in (one, other))
    return None if a is None or b is None else f"{a} / {b} s"


def curves(data: Data, gate: GateSettings) -> str:
    """The plots of a run, or of a window of it."""
    if data.first is None or data.last is None:
        return "<h2>Curves</h2><p class='none'>no events in the log yet</p>"
    ends = [mark.time for mark in data.of("miner_restarting")]
    down = [Bands("bad", "hang or restart", _outages(data))]
    slow = [
        (mark.time, float(mark.fields.get("step_time_s") or 0.0)) for mark in data.of("slow_step")
    ]
    strange = [
        (mark.time, _near(data.loss, mark.time))
        for mark in data.of("loss_nan", "loss_spike", "loss_divergence")
    ]
    fates = [
        EventLines("good", "verified", [mark.time for mark in data.of("upload_succeeded")]),
        EventLines("bad", "failed", [mark.time for mark in data.of("upload_failed")]),
        EventLines("warn", "blocked", [mark.time for mark in data.of("upload_blocked")]),
    ]
    age = data.repo_age if data.repo_age.values else _nothing_over(data, fates)
    memory = data.gpu_memory if data.gpu_memory.values else data.step_memory
    health = part(data.status, "health")
    why = part(health, "unknown").get("gpus") or part(health, "gpus").get("reason")
    no_gpu = f"no data: {why}" if why else "no data"
    plots = [
        Plot(
            "Loss",
            "",
            data.loss,
            [Dots("bad", "NaN, spike or divergence", strange)],
            bands=down,
            zero=False,
            breaks=ends,
        ),
        Plot(
            "Step time",
            "s",
            data.step_time,
            [Dots("warn", "slow step", slow)],
            bands=down,
            breaks=ends,
        ),
        Plot("Repo age", "s", age, (), fates, limit=gate.repo_age_limit_s),
        Plot("GPU memory", "GB (lowest GPU)", memory, nothing=no_gpu),
        Plot("GPU use", "% (lowest GPU)", data.gpu_use, nothing=no_gpu),
        Plot("Goodput", "share of time spent training", data.goodput),
    ]
    return "<h2>Curves</h2>" + "".join(draw(plot, data.first, data.last) for plot in plots)


def _outages(data: Data) -> list[tuple[float, float]]:
    """From each hang or exit to the next step, or to the end of the data."""
    spans: list[tuple[float, float]] = []
    for mark in data.of("hang_detected", "miner_exited"):
        after = data.step_time.since(mark.time).times
        end = after[0] if after else (data.last or mark.time)
        if not spans or mark.time > spans[-1][1]:
            spans.append((mark.time, end))
    return spans


def _near(series: TimeSeries, time: float) -> float:
    """The last value at or before a time, for a mark whose NaN cannot be drawn; 0 without one."""
    before = [value for t, value in zip(series.times, series.values, strict=True) if t <= time]
    return before[-1] if before else 0.0


def _nothing_over(data: Data, fates: Iterable[EventLines]) -> TimeSeries:
    """A flat line that carries the upload marks, where uploads exist and the repo's age was never
    read."""
    if data.first is None or data.last is None or not any(lines.times for lines in fates):
        return TimeSeries()
    return TimeSeries([data.first, data.last], [0.0, 0.0])


def _goodput(data: Data) -> str:
    shares = {
        k: float(v) for k, v in part(part(data.status, "steps"), "goodput").items() if v and v > 0
    }
    if not shares:
        return "<h2>Where the time went</h2><p class='none'>unknown: no steps yet</p>"
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    colour = {name: _COLOURS.get(name, "#8d99ae") for name in shares}
    bars = "".join(
        f'<i style="width:{100 * v:.2f}%;background:{colour[k]}" title="{escape(k)}"></i>'
        for k, v in ordered
    )
    keys = "".join(
        f'<span><i style="background:{colour[k]}"></i>{escape(k.replace("_", " "))} {v:.1%}</span>'
        for k, v in ordered
    )
    return (
        f'<h2>Where the time went</h2><div class="bar">{bars}</div><div class="legend">{keys}</div>'
    )


def _milestones(data: Data, gate: GateSettings) -> str:
    rows: list[str] = []
    stage = ""
    for milestone in milestones(data, gate):
        if milestone.stage != stage:
            stage = milestone.stage
            rows.append(f'<tr class="stage"><th colspan="3">{escape(stage)}</th></tr>')
        kind, word = _SIGNS[milestone.state]
        detail = when(milestone.reached) if milestone.reached is not None else milestone.reason
        cells = f'<td>{escape(milestone.title)}</td><td class="state {kind}">{word}</td>'
        rows.append(f'<tr>{cells}<td class="why">{escape(detail)}</td></tr>')
    head = "<tr><th>milestone</th><th></th><th>when (UTC), or why not</th></tr>"
    table = _table("Milestones", head, rows, "milestones")
    return f"<details><summary>Milestones</summary>{table}</details>"


def _table(title: str, head: str, rows: list[str], kind: str) -> str:
    if not rows:
        return f"<h2>{escape(title)}</h2><p class='none'>none</p>"
    table = f'<table class="{kind}">{head}{"".join(rows)}</table>'
    return f'<h2>{escape(title)}</h2><div class="scroll">{table}</div>'


def _costs(data: Data) -> str:
    if data.costs is None:
        return "<h2>What monitoring costs</h2><p class='none'>no ledger yet</p>"
    operations = sorted(
        data.costs["operations"].items(), key=lambda row: (-row[1]["total_time"], row[0])
    )
    rows = [
        f'<tr><td>{escape(name)}</td><td class="n">{row["calls"]}</td><td '
        f'class="n">{row["total_time"]:.2f} s</td>'
        f'<td class="n">{row["background_time"]:.2f} s</td><td '
        f'class="n">{row["percentage"]:.3f}%</td>'
        f"<td>{escape(row['impact'])}</td><td>{escape(row['status'])}</td></tr>"
        for name, row in operations[:_TABLE_ROWS]
    ]
    head = (
        '<tr><th>operation</th><th class="n">calls</th><th class="n">blocking time</th>'
        '<th class="n">background CPU</th><th class="n">share</th><th>impact</th>'
        "<th>status</th></tr>"
    )
    share, budget = data.costs["total_percentage"], data.costs["budget_percentage"]
    return _table(
        f"What monitoring costs: {share:.2f}% of training time (budget {budget:g}%)",
        head,
        rows,
        "costs",
    )


def _alarms(data: Data) -> list[Mark]:
    events = (
        "incident",
        "hang_detected",
        "crash_loop",
        "cpu_fallback",
        "repo_stale",
        "straggler",
        "gpu_drop",
    )
    wanted = [mark for mark in data.marks if mark.level in _WORST or mark.event in events]
    return wanted[-_TABLE_ROWS:]


def _fates(data: Data) -> list[Mark]:
    return data.of(
        "upload_succeeded", "upload_failed", "upload_blocked", "audit_failed", "audit_passed"
    )[-_TABLE_ROWS:]


def _pushes(rows: Sequence[Mapping[str, Any]]) -> str:
    """The outcome of each push, from the ledger: it keeps pushes longer than the log keeps
    lines."""
    kinds = {"verified": "good", "failed": "bad", "refuted": "bad"}
    cells = [
        "<tr><td "
        f'class="when">{when(row["wall"])}</td><td>{escape(str(row["tag"] or "unknown"))}</td>'
        f'<td class="{kinds.get(row["outcome"], "warn")}">{escape(str(row["outcome"]))}</td>'
        f'<td class="n">{escape(_number(row["bytes"], ",.0f") or "unknown")}</td>'
        f'<td class="n">{escape(_number(row["seconds"], ".1f", " s") or "unknown")}</td>'
        f'<td class="n">{escape(_number(row["attempts"], ".0f") or "unknown")}</td>'
        f"<td>{escape(str(row['checksum'] or 'unknown')[:12])}</td>"
        f"<td>{escape(str(row['error'] or ''))}</td></tr>"
        for row in reversed(rows[-_TABLE_ROWS:])
    ]
    head = (
        '<tr><th>when (UTC)</th><th>tag</th><th>outcome</th><th class="n">bytes</th><th '
        'class="n">took</th>'
        '<th class="n">attempts</th><th>checksum</th><th>why</th></tr>'
    )
    return _table("Upload history", head, cells, "costs")


def _events(title: str, marks: list[Mark]) -> str:
    kinds = {"critical": "bad", "error": "bad", "warning": "warn"}
    rows = [
        f'<tr><td class="when">{when(mark.time)}</td>'
        f'<td class="event {kinds.get(mark.level, "")}">{escape(mark.event)}</td>'
        f"<td>{escape(mark.msg.partition(chr(10))[0])}</td></tr>"
        for mark in reversed(marks)
    ]
    return _table(title, "<tr><th>when (UTC)</th><th>event</th><th>what</th></tr>", rows, "log")


def _foot(data: Data) -> str:
    total = sum(data.counts.values())
    torn = f", {counted(data.unreadable, 'unreadable line')} passed over" if data.unreadable else ""
    words = (
        f"{counted(total, 'event')} read{torn}. Scores come from validators; "
        "miner-guard does not estimate them."
    )
    return f"<p><small>{escape(words)}</small></p>"
