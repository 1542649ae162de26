"""The page about a run: a JSON document from run.db that page.js draws, asked for from the HTTP
port or embedded in a file."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib import resources
from typing import Any

from miner_guard.config import GateSettings
from miner_guard.record.redaction import public
from miner_guard.record.status_document import RunState, StatusDocument, read_status
from miner_guard.record.store import RunReader, StoredEvent
from miner_guard.record.words import counted, gb, or_unknown, percentages, visible
from miner_guard.show.runbook import rows as runbook_rows
from miner_guard.show.series import Record, Window, curves, milestones, outages
from miner_guard.state_dir import StateDir, finite, read_json
from miner_guard.system.clock import parse_iso_utc
from miner_guard.watch import incident
from miner_guard.watch.state_words import (
    BRIEF_SHARE,
    CELLS,
    FIND_THE_GUARD,
    GREEN,
    GREY,
    NOTHING,
    RED,
    SHARE_WORDS,
    UNWATCHED,
    YELLOW,
    earning_words,
    first_words,
    freshness,
    is_live,
    lagging,
    now_of,
    read_state,
    share_words,
    span,
    state_since,
    time_of_reading,
    week_of,
)

KINDS = {GREEN: "good", YELLOW: "warn", RED: "bad", GREY: "idle", UNWATCHED: "none"}
"""CSS class of each colour."""

_WORST = ("critical", "error")
_ALARMS = ("repo_stale", "straggler", "gpu_drop", "guard_killed", "incident", "crash_loop")
"""Alarms whatever their level; the others are `error` or `critical`."""

_MARKS = (
    *_ALARMS,
    *("slow_step", "loss_nan", "loss_spike", "loss_divergence", "hang_detected", "upload_blocked"),
    *("miner_started", "miner_restarting", "miner_exited", "upload_succeeded", "upload_failed"),
    *("upload_allowed", "gpu_diagnostics"),
)
_MAX_MARKS = 5_000
"""Of the newest events worth a mark or a row."""

_MAX_ROWS = 40
_MAX_TILES = 6
_REPEATED_WITHIN_S = 3600.0
_NUMBER = re.compile(r"[-+.\d]+")
_REPEATS = re.compile(r" \(asked \d+ more times? since the last line\)$")
"""The log counts the blocks that it left out; a row counts the ones that it merges."""


@dataclass(frozen=True)
class Tile:
    """One figure. `kind` is the CSS class of its colour: `bad`, `warn` or empty."""

    name: str
    value: str
    kind: str = ""
    note: str = ""
    """The limit, the window, or an explanation."""


def document(
    state: StateDir, gate: GateSettings, window: Window | None = None, *, drawn: bool = True
) -> dict[str, Any]:
    """What the page shows of a window; without `drawn`, all but the curves, which take most of the
    time."""
    window = window or Window()
    status, record = read_status(state) or StatusDocument(), RunReader(state.db)
    marks = _marks(record, window)
    counts = record.counts(window.since, window.until)
    alarms = _alarms(marks)
    pushes = record.rows("upload", since=window.start or 0.0, limit=_MAX_ROWS)
    costs = read_json(state.costs)
    shown = read_state(status)
    ends = record.span() or (None, None)
    card = incident.latest(record, window.since)
    page = {
        "title": f"{first_words(shown)} · {status.name or state.root.name}",
        "state": _state(status, shown),
        "about": {
            "run": status.run_id,
            "name": status.name or state.root.name,
            "host": status.host,
            "first": ends[0],
            "last": ends[1],
            "now": now_of(status),
            "events": counted(sum(counts.values()), "event"),
        },
        "week": _week(status),
        "live": is_live(status),
        "incident": None if card is None else {**asdict(card), "sentence": card.sentence},
        "tiles": [asdict(tile) for tile in _tiles(status, counts, marks)],
        "ranks": [
            {"rank": rank, "mark": mark, **asdict(status.steps.per_rank[rank])}
            for rank, mark in lagging(status.steps).items()
        ],
        "gpus": [dict(row) for row in status.health.gpus.gpus if row],
        "without_gpu": status.health.without_gpu(),
        "time": percentages(status.steps.goodput),
        "alarms": alarms,
        "uploads": [{**row, "error": public(row["error"] or "")} for row in reversed(pushes)],
        "costs": costs if isinstance(costs, dict) and "operations" in costs else None,
        "runbook": _runbook([shown.event, *(alarm["event"] for alarm in alarms)]),
    }
    if drawn:
        run = Record.read(record, window, marks)
        page["curves"] = [asdict(c) for c in curves(run, gate)]
        page["outages"] = outages(run)
        whole = window.start is None or window.start <= (ends[0] or 0.0)
        page["milestones"] = milestones(run, gate) if whole else []
    document: dict[str, Any] = finite(page)
    return document


def _marks(record: RunReader, window: Window) -> list[StoredEvent]:
    until = window.until
    events = record.notable(_MARKS, "error", since=window.since, limit=_MAX_MARKS, newest=not until)
    return [event for event in events if not until or event.ts < until]


def _state(status: StatusDocument, shown: RunState) -> dict[str, Any]:
    """The four answers: what the run does, since when, why, and what to do."""
    return {
        "kind": KINDS[shown.colour or GREY],
        "line": state_since(shown, time_of_reading(status)),
        "age": freshness(status),
        "cause": shown.cause,
        "earning": earning_words(shown),
        "next": shown.next_step or NOTHING,
        "event": shown.event,
    }


def _week(status: StatusDocument) -> dict[str, Any] | None:
    """Up to a week of states, laid out like a status page."""
    week = week_of(status, CELLS)
    if week is None:
        return None
    return {
        "cells": [KINDS[cell] for cell in week.cells],
        "start": week.start,
        "end": week.end,
        "cell_s": week.cell_s,
        "words": share_words(week),
        "legend": {KINDS[colour]: words for colour, words in SHARE_WORDS.items()},
        "how": f"Each cell covers {span(week.cell_s)} and shows the worst state that held for "
        f"{BRIEF_SHARE:.0%} of it or longer; the last cell also shows the present state.",
    }


def _tiles(
    status: StatusDocument, counts: Mapping[str, int], marks: Sequence[StoredEvent]
) -> list[Tile]:
    """At most six figures, none of them unknown or zero: what is wrong first."""
    tiles = [*_problems(status, counts, marks), *_figures(status, counts)]
    tiles.sort(key=lambda tile: ("bad", "warn", "").index(tile.kind))
    return tiles[:_MAX_TILES]


def _figures(status: StatusDocument, counts: Mapping[str, int]) -> Iterator[Tile]:
    steps, repo, chain = status.steps, status.uploads.repo, status.chain
    if steps.loss is not None:
        kind = "bad" if isinstance(steps.loss, str) else ""
        first = steps.loss_first
        note = "" if not isinstance(first, float) else f"first {first:.2f}"
        yield Tile("loss", or_unknown(steps.loss, ".2f"), kind, note)
    if steps.p50_s is not None:
        kind = "warn" if steps.grade == "bad" else ""
        p95 = None if steps.p95_s is None else f"95% within {steps.p95_s:.3g} s"
        note = ", ".join(filter(None, ("median", p95, steps.grade)))
        yield Tile("step time", or_unknown(steps.p50_s, ".3g", " s"), kind, note)
    if (goodput := percentages(steps.goodput)).get("training"):
        most = next(
            (f"{k.replace('_', ' ')} {v}" for k, v in goodput.items() if k != "training"), ""
        )
        yield Tile("goodput", goodput["training"], "", most)
    if repo.age_s is not None:
        kind = "bad" if repo.stale else "warn" if repo.due else ""
        yield Tile(
            "repo age", f"{repo.age_s:.0f}s", kind, f"limit {or_unknown(repo.limit_s, '.0f', 's')}"
        )
    if done := counts.get("upload_succeeded", 0):
        yield Tile("uploads verified", f"{done}")
    if gpus := status.health.gpus.gpus:
        well = sum(row.get("state") == "ok" for row in gpus)
        yield Tile("GPUs ok", f"{well} of {len(gpus)}", "" if well == len(gpus) else "bad")
    if chain.incentive:
        yield Tile("incentive", f"{chain.incentive:.4f}", "", "set by validators")


def _problems(
    status: StatusDocument, counts: Mapping[str, int], marks: Sequence[StoredEvent]
) -> Iterator[Tile]:
    blocked = [m for m in marks if m.name == "upload_blocked" and m.level != "info"]
    for name, event, count in (
        ("hangs", "hang_detected", counts.get("hang_detected", 0)),
        ("restarts", "miner_restarting", status.restarts),
        ("slow steps", "slow_step", counts.get("slow_step", 0)),
        ("uploads failed", "upload_failed", counts.get("upload_failed", 0)),
        ("uploads blocked", "upload_blocked", len(blocked)),
    ):
        if count:
            last = next((m.ts for m in reversed(marks) if m.name == event), "")
            one = re.sub(r"s\b", "", name, count=1)
            yield Tile(
                one if count == 1 else name,
                f"{count}",
                "warn",
                f"last {last[5:16].replace('T', ' ')} UTC",
            )
    free, costs = status.health.host.get("disk_free_bytes"), status.costs
    if status.verdict is not None and status.verdict.key == "disk" and free is not None:
        yield Tile("disk free", or_unknown(gb(free), ".1f", " GB"), "bad")
    if costs.budget_status in ("warning", "critical"):
        note = f"of training time, budget {or_unknown(costs.budget_pct, 'g', '%')}"
        yield Tile("monitoring", or_unknown(costs.share_pct, ".2f", "%"), "bad", note)


def _alarms(marks: Sequence[StoredEvent]) -> list[dict[str, Any]]:
    """Incidents and alarms, newest first. Those that differ only in their numbers, as in a crash
    loop, share the row of the newest if each is within `_REPEATED_WITHIN_S` of the next."""
    latest: dict[tuple[str, str], dict[str, Any]] = {}
    rows = []
    for mark in marks:
        late_block = mark.name == "upload_blocked" and mark.level != "info"
        if not (mark.level in _WORST or mark.name in _ALARMS or late_block):
            continue
        time, text = parse_iso_utc(mark.ts), public(_REPEATS.sub("", mark.headline))
        key = (mark.name, _NUMBER.sub("", text.lower()))
        row = latest.get(key)
        if row is None or time - row["time"] > _REPEATED_WITHIN_S:
            latest[key] = row = {"event": mark.name, "since": time, "count": 0}
            rows.append(row)
        kind = "bad" if mark.level in _WORST else "warn"
        row |= {"time": time, "kind": kind, "text": text, "count": row["count"] + 1}
    return sorted(rows, key=lambda row: -row["time"])[:_MAX_ROWS]


def _runbook(events: Sequence[str | None]) -> dict[str, Any]:
    """The runbook's rows for the events on the page, so that it is useful even if nothing else is
    reachable."""
    by_event = {event: runbook_rows().get(event or "") for event in dict.fromkeys(events)}
    return {event: asdict(row) for event, row in by_event.items() if event and row is not None}


# --- HTML ---


def render(state: StateDir, *, gate: GateSettings | None = None, since: str = "") -> str:
    """The page as a standalone file. `since`: omit events before this ISO time."""
    window = Window(parse_iso_utc(since) if since else None)
    return html(document(state, gate or GateSettings(), window))


def html(page: Mapping[str, Any] | None) -> str:
    """The page with its data; without, the one on the HTTP port, which asks for them."""
    title = "miner-guard" if page is None else str(page["title"])
    text = json.dumps(page, ensure_ascii=False).replace("<", "\\u003c")
    meta = (
        "" if page is None else f'<meta http-equiv="Content-Security-Policy" content="{policy()}">'
    )
    words = {"title": title, "gone": FIND_THE_GUARD}
    return visible(_filled("page.html", {k: escape(v) for k, v in words.items()}, meta, text))


def _filled(name: str, words: Mapping[str, str], meta: str, data: str) -> str:
    parts = {**words, "meta": meta, "style": _style(), **_scripts(), "data": data}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _template(name))


@functools.cache
def policy() -> str:
    """What the page may load: its own style and scripts, and nothing from anywhere else."""
    scripts = " ".join(map(_digest, _scripts().values()))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {_digest(_style())}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _style() -> str:
    return _template("uplot.min.css") + _template("page.css")


def _scripts() -> dict[str, str]:
    return {"uplot": _template("uplot.min.js"), "script": _template("page.js")}


@functools.cache
def _template(name: str) -> str:
    return (resources.files("miner_guard.show") / "templates" / name).read_text(encoding="utf-8")
