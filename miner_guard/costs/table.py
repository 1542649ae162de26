"""Renders a report as source 000's cost table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TITLES = (
    "Operation",
    "Calls",
    "Time/Call",
    "Frequency",
    "Per 1000 steps",
    "Total",
    "Background",
    "Share",
    "Impact",
    "Status",
)
_WORDS_AFTER = 8
"""This column and those after it contain words and are left-aligned, like the first."""

_WORDS = {"ok": "within budget", "warning": "OVER BUDGET", "critical": "FAR OVER BUDGET"}


def text(report: Mapping[str, Any]) -> str:
    """Render the report: the verdict, then one row per operation, most expensive first."""
    operations: Mapping[str, Mapping[str, Any]] = report["operations"]
    ordered = sorted(
        operations.items(),
        key=lambda row: (-row[1]["total_time"], -row[1]["background_time"], row[0]),
    )
    rows = [_TITLES, *(_row(name, values, report) for name, values in ordered)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
    lines = [
        "  ".join(
            cell.rjust(width) if 1 <= place < _WORDS_AFTER else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    head = (
        f"Monitoring overhead: {report['total_percentage']:.2f}% of "
        f"{report['training_time']:.0f}s training"
        f" (budget {report['budget_percentage']:g}%): {_WORDS[report['budget_status']]}"
    )
    return "\n".join([head, *(line.rstrip() for line in lines)])


def _row(name: str, values: Mapping[str, Any], report: Mapping[str, Any]) -> tuple[str, ...]:
    average = values["average_time"]
    training, step = report["training_time"], report.get("step_time")
    return (
        name,
        str(values["calls"]),
        "-" if average is None else seconds(average),
        _frequency(values["calls"], training, step),
        _per_thousand_steps(values["total_time"], training, step),
        seconds(values["total_time"]),
        seconds(values["background_time"]),
        f"{values['percentage']:.2f}%",
        values["impact"],
        values["status"],
    )


def _frequency(calls: int, training_s: float, step_s: float | None) -> str:
    """Format the average interval between runs of the operation, in steps or, if the step time is
    unknown, in seconds."""
    if calls < 2 or training_s <= 0:
        return "once" if calls == 1 else "-"
    interval = training_s / calls
    if not step_s:
        return f"every {seconds(interval)}"
    steps = interval / step_s
    return "every step" if steps < 1.5 else f"every {steps:.0f} steps"


def _per_thousand_steps(total_s: float, training_s: float, step_s: float | None) -> str:
    """Format the operation's cost per 1000 steps; `-` if the step time is unknown."""
    if not step_s or training_s <= 0:
        return "-"
    return seconds(1000 * total_s * step_s / training_s)


def seconds(value: float) -> str:
    """Format a duration in ms (three significant digits) or in seconds."""
    if value == 0:
        return "0s"
    return f"{value * 1000:.3g}ms" if value < 1 else f"{value:.1f}s"
