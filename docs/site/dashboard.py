"""Makes ops/grafana/miner-guard.json, the Grafana dashboard, from the metrics that the guard
exposes: `python -m docs.site.dashboard` in a clone's root.

A metric's unit, legend and query follow from its name, labels and type, and a panel's description
is the metric's help text. A metric that the layout does not name gets a panel in the last row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from miner_guard.show.metrics import LEVELS, PREFIX, Families
from miner_guard.watch.state_words import GREEN, GREY, RED, YELLOW
from tests.support.metric_sample import full_status

FILE = Path(__file__).parents[2] / "ops" / "grafana" / "miner-guard.json"
FAMILIES = {
    family.name.removeprefix(PREFIX): family for family in Families(full_status(), "").collect()
}

LAYOUT: dict[str, dict[str, str]] = {
    "Training": {
        "Loss": "loss",
        "Step time": "step_seconds",
        "Last step age": "no_step_seconds",
        "State": "verdict_level",
        "Where the time goes": "time_ratio",
        "Events in an hour": "events",
    },
    "Ranks and GPUs": {
        "Step time by rank": "rank_step_seconds",
        "Last step age by rank": "rank_last_step_age_seconds",
        "GPU use": "gpu_utilization_ratio",
        "GPU memory": "gpu_memory_used_bytes",
        "GPU temperature": "gpu_temperature_celsius",
        "GPU power": "gpu_power_watts",
    },
    "Uploads and the chain": {
        "Repo age": "no_upload_seconds repo_age_limit_seconds",
        "Duration of an upload": "upload_seconds",
        "From a hang to the next step": "recovery_seconds",
        "Incentive": "chain_incentive",
        "Registered": "chain_registered",
    },
    "The guard and its host": {
        "Monitoring share": "monitoring_ratio monitoring_budget_ratio",
        "Host memory": "host_memory_used_bytes host_memory_limit_bytes",
        "The guard's CPU": "guard_cpu_seconds",
    },
}
"""Rows, their panels, and each panel's metrics, whose names are separated by a space."""

LIMITS = {"step_seconds": 60, "no_step_seconds": 300, "no_upload_seconds": 2000}
"""Where a dashed red line runs."""

UNITS = {
    "seconds": "s",
    "bytes": "bytes",
    "ratio": "percentunit",
    "celsius": "celsius",
    "watts": "watt",
}

COLUMNS: dict[str, tuple[str, str, tuple[float, float] | None]] = {
    "State": ("verdict_level", "none", None),
    "Since": ("verdict_since_timestamp_seconds", "dateTimeFromNow", None),
    "Last step": ("no_step_seconds", "s", (120, 300)),
    "Repo age": ("no_upload_seconds", "s", (1800, 2000)),
    "Loss": ("loss", "none", None),
    "Step p50": ("step_seconds", "s", (40, 60)),
    "Steps": ("steps", "none", None),
    "Restarts": ("restarts", "none", (1, 4)),
    "Goodput": ("time_ratio", "percentunit", None),
    "Incentive": ("chain_incentive", "none", None),
    "Monitoring": ("monitoring_ratio", "percentunit", (0.05, 0.1)),
}
"""The fleet's table: metric, unit, and from where on a value is orange and red."""

WHO = {"instance": "Miner", "miner": "Name", "netuid": "Subnet", "hotkey": "Hotkey"}
COLOURS = {GREEN: "green", GREY: "text", YELLOW: "orange", RED: "red"}
MINE = '{instance=~"$instance"}'
PROMETHEUS = {"type": "prometheus", "uid": "${datasource}"}
LOKI = {"type": "loki", "uid": "${loki}"}


def text() -> str:
    """The dashboard as Grafana imports it, with one panel a line."""
    board = _dashboard()
    panels = ",\n  ".join(json.dumps(panel) for panel in board.pop("panels"))
    return f'{json.dumps(board, indent=1)[:-2]},\n "panels": [\n  {panels}\n ]\n}}\n'


def _dashboard() -> dict[str, Any]:
    events = {"States": "verdict_changed", "Restarts": "hang_detected|miner_restarting|crash_loop"}
    line = '| json | line_format "{{.msg}}"'
    asked = {name: f'{{event=~"{which}"}} {line}' for name, which in events.items()}
    marks = {"datasource": LOKI, "enable": True, "iconColor": "red"}
    metrics = {"name": "datasource", "label": "Metrics", "type": "datasource"}
    logs = {"name": "loki", "label": "Logs", "type": "datasource"}
    miners: dict[str, Any] = {
        "name": "instance",
        "label": "Miner",
        "type": "query",
        "datasource": PROMETHEUS,
    }
    miners |= {"query": f"label_values({PREFIX}miner_running, instance)", "refresh": 2}
    several = {"multi": True, "includeAll": True}
    variables = [{**metrics, "query": "prometheus"}, {**logs, "query": "loki"}, miners | several]
    return {
        "title": "miner-guard",
        "uid": "miner-guard",
        "schemaVersion": 39,
        "tags": ["miner-guard"],
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "utc",
        "refresh": "30s",
        "editable": False,
        "annotations": {
            "list": [{"name": name, "expr": expr, **marks} for name, expr in asked.items()]
        },
        "templating": {"list": variables},
        "panels": [{"id": number, **panel} for number, panel in enumerate(_placed(), 1)],
    }


def _placed() -> Iterator[dict[str, Any]]:
    """All panels, three beside each other, below the table of all miners."""
    yield {**_table(), "gridPos": {"x": 0, "y": 0, "w": 24, "h": 9}}
    y = 9
    for title, layout in LAYOUT.items():
        panels = [_panel(name, metrics.split()) for name, metrics in layout.items()]
        yield _row(title, y)
        yield from _beside(panels, y + 1)
        y += 1 + 7 * -(-len(panels) // 3)
    target = {"refId": "A", "expr": '{level=~"error|critical"}', "datasource": LOKI}
    logs: dict[str, Any] = {
        "title": "What the guards report",
        "description": "Errors, from Loki.",
        "type": "logs",
    }
    logs |= {"datasource": LOKI, "targets": [target]}
    yield {**logs, "gridPos": {"x": 0, "y": y, "w": 24, "h": 8}}
    named = [each for layout in LAYOUT.values() for each in layout.values()]
    shown = {*" ".join(named).split(), *(metric for metric, *_ in COLUMNS.values())}
    rest = [_panel(_words(name), [name]) for name in FAMILIES if name not in shown]
    placed = [{"id": 100 + n, **panel} for n, panel in enumerate(_beside(rest, y + 9))]
    yield {**_row("Everything else", y + 8), "collapsed": True, "panels": placed}


def _row(title: str, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": 24, "h": 1}
    return {"title": title, "type": "row", "collapsed": False, "gridPos": place, "panels": []}


def _beside(panels: Iterable[dict[str, Any]], y: int) -> Iterator[dict[str, Any]]:
    for n, panel in enumerate(panels):
        yield {**panel, "gridPos": {"x": 8 * (n % 3), "y": y + 7 * (n // 3), "w": 8, "h": 7}}


def _panel(title: str, names: list[str]) -> dict[str, Any]:
    """A chart over time of one metric, or of some that belong together."""
    first = FAMILIES[names[0]]
    defaults: dict[str, Any] = {"unit": UNITS.get(names[0].rpartition("_")[2], "none")}
    if first.type == "counter":
        defaults["unit"] = "percentunit" if names[0].endswith("cpu_seconds") else "none"
    if names[0] in LIMITS:
        defaults |= {"thresholds": _thresholds("transparent", {LIMITS[names[0]]: "red"})}
        defaults |= {"custom": {"thresholdsStyle": {"mode": "dashed"}}}
    asked = [pair for name in names for pair in _queries(FAMILIES[name], own=len(names) > 1)]
    targets = [
        {"refId": chr(ord("A") + n), "expr": expr, "legendFormat": legend, "datasource": PROMETHEUS}
        | ({"exemplar": True} if first.type == "counter" else {})
        for n, (expr, legend) in enumerate(asked)
    ]
    return {
        "title": title,
        "description": " ".join(FAMILIES[name].documentation for name in names),
        "type": "timeseries",
        "datasource": PROMETHEUS,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": targets,
    }


def _queries(family: Metric, *, own: bool) -> Iterator[tuple[str, str]]:
    """Queries and legends. `own`: the panel has other metrics too, so the legend names this one."""
    labels = [label for label in family.samples[0].labels if label not in ("le", "uuid")]
    named = {"rank": "rank {{rank}}", "gpu": "GPU {{gpu}}"}
    own_labels = [named.get(label, f"{{{{{label}}}}}") for label in labels]
    who = " ".join(["{{miner}} {{instance}}", *own_labels])
    if own:
        who += f" {_words(family.name.removeprefix(PREFIX))}"
    if family.type == "histogram":
        # Steps and uploads take minutes, so a shorter interval would often have none.
        rate = f"rate({family.name}_bucket{MINE}[{'15m' if 'step' in family.name else '6h'}])"
        yield f"histogram_quantile(0.5, {rate})", f"{who} p50"
        yield f"histogram_quantile(0.95, {rate})", f"{who} p95"
        yield f"histogram_quantile(0.95, sum by (le) ({rate}))", "all p95"
    elif family.name == f"{PREFIX}events":
        usual = 'event!~"inner_step|health_snapshot"'
        count = f"increase({family.name}_total{MINE[:-1]}, {usual}}}[1h])"
        yield f"topk(12, sum by (event) ({count}))", "{{event}}"
    elif family.type == "counter":
        yield f"rate({family.name}_total{MINE}[$__rate_interval])", who
    else:
        yield f"{family.name}{'_info' if family.type == 'info' else ''}{MINE}", who


def _table() -> dict[str, Any]:
    """One row a miner, the worst first."""
    targets, overrides, renamed = list[Any](), list[Any](), dict(WHO)
    for column, (name, unit, limits) in COLUMNS.items():
        by = ", ".join(WHO) if not targets else "instance"
        expr = f"{PREFIX}{name}{'_total' if FAMILIES[name].type == 'counter' else ''}"
        if FAMILIES[name].type == "histogram":
            expr = f"histogram_quantile(0.5, rate({expr}_bucket[15m]))"
        only = '{category="training"}' if name == "time_ratio" else ""
        expr = f"max by ({by}) ({expr}{only})"
        expr += " * 1000" if unit.startswith("date") else ""
        shape = {"format": "table", "instant": True, "datasource": PROMETHEUS}
        targets.append({"refId": name, "expr": expr, **shape})
        renamed[f"Value #{name}"] = column
        properties: list[dict[str, Any]] = [{"id": "unit", "value": unit}]
        if limits:
            steps = dict(zip(limits, ("orange", "red"), strict=True))
            properties.append({"id": "thresholds", "value": _thresholds("green", steps)})
            properties.append({"id": "custom.cellOptions", "value": {"type": "color-text"}})
        overrides.append(_of_column(column, *properties))
    words = FAMILIES["verdict_level"].documentation.rstrip(".").split(", ")
    colours = {str(level): COLOURS[colour] for colour, level in LEVELS.items()}
    states = {
        number: {"text": text, "color": colours[number]}
        for number, _, text in (word.partition(" ") for word in words)
    }
    overrides[0]["properties"] += [
        {"id": "mappings", "value": [{"type": "value", "options": states}]},
        {"id": "custom.cellOptions", "value": {"type": "color-background"}},
    ]
    links = [
        {"title": "The miner's page", "url": "http://${__value.text}/", "targetBlank": True},
        {"title": "Only this miner", "url": "/d/miner-guard?var-instance=${__value.text}"},
    ]
    overrides.append(_of_column("Miner", {"id": "links", "value": links}))
    hidden = {f"Time {n}".removesuffix(" 0"): True for n in range(len(COLUMNS) + 1)}
    places = {name: place for place, name in enumerate(renamed)}
    organize = {"excludeByName": hidden, "renameByName": renamed, "indexByName": places}
    return {
        "title": "All miners",
        "description": "One row per miner, the worst first. Click a name for the miner's own page.",
        "type": "table",
        "datasource": PROMETHEUS,
        "fieldConfig": {"defaults": {}, "overrides": overrides},
        "options": {"sortBy": [{"displayName": "State", "desc": True}], "showHeader": True},
        "targets": targets,
        "transformations": [
            {"id": "joinByField", "options": {"byField": "instance", "mode": "outer"}},
            {"id": "organize", "options": organize},
        ],
    }


def _of_column(title: str, *properties: dict[str, Any]) -> dict[str, Any]:
    return {"matcher": {"id": "byName", "options": title}, "properties": [*properties]}


def _thresholds(first: str, steps: dict[Any, str]) -> dict[str, Any]:
    colours = [{"color": first, "value": None}]
    colours += [{"color": colour, "value": value} for value, colour in steps.items()]
    return {"mode": "absolute", "steps": colours}


def _words(name: str) -> str:
    """A metric's name as words, without its unit."""
    stem, _, unit = name.rpartition("_")
    return (stem if unit in UNITS and stem else name).replace("_", " ").capitalize()


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
