"""The report on a run: one self-contained HTML page, written to a file or served live on the HTTP
port."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from miner_guard import state_dir
from miner_guard.config import GateSettings
from miner_guard.record.words import counted, percentages, visible
from miner_guard.show import sections
from miner_guard.show.charts import curves
from miner_guard.show.data import Data, gather
from miner_guard.show.sections import about, strip, tiles, verdict
from miner_guard.watch.state_words import first_words, read_state

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
    script = template("chart.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return page(
        title,
        f"<main>{content}</main><script>{script}</script>",
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'",
    )


def template(name: str) -> str:
    """One of the files under `templates/`."""
    return (resources.files("miner_guard.show") / "templates" / name).read_text(encoding="utf-8")


def title_of(data: Data, state: state_dir.StateDir) -> str:
    """The page's title: what the run does, and the miner's host, else the state directory's
    name."""
    return f"{first_words(read_state(data.status))} · {data.host or state.root.name}"


def page(title: str, content: str, policy: str = "") -> str:
    """A complete HTML document around `content`. `policy`: what a file may load, where no server
    says so."""
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">' if policy else ""
    return visible(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"{meta}"
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
    """The page's sections, most urgent for on-call first. `data`: the window to show; `whole`: the
    whole run, for the state, the week and the milestones; `plots`: the drawn curves."""
    return "\n".join(
        [
            about(data, title),
            verdict(whole),
            strip(whole),
            sections.alarms(data, gate),
            tiles(data, gate),
            sections.fates(data),
            sections.pushes(pushes),
            sections.ranks(data.status),
            sections.gpus(data.status),
            plots,
            _goodput(data),
            sections.costs(data),
            sections.milestone_table(whole, gate),
            sections.runbook(data, gate),
            _foot(data),
        ]
    )


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
    words = {k: escape(f"{k.replace('_', ' ')} {share}") for k, share in percent.items()}
    keys = "".join(
        f'<span><i style="background:{colour[k]}"></i>{text}</span>' for k, text in words.items()
    )
    return (
        f'<h2>Where the time went</h2><div class="bar">{bars}</div><div class="legend">{keys}</div>'
    )


def _foot(data: Data) -> str:
    total = sum(data.counts.values())
    words = (
        f"{counted(total, 'event')} read. Scores come from validators; "
        "miner-guard does not estimate them."
    )
    return f"<p><small>{escape(words)}</small></p>"
