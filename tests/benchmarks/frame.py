"""The results of a benchmark, and how they are printed. Where possible, figures are ratios measured
in one run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Row:
    """One figure of a benchmark's table."""

    what: str
    value: float | None
    """None if it could not be measured here; `note` says why."""

    unit: str
    target: str = ""
    """The target in human-readable form (`<= 200 µs`); empty if there is none."""

    note: str = ""


def per_call(
    function: Callable[[], object],
    calls: int,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds per call by `clock` (`time.process_time` for CPU): the median of `repeats` rounds of
    `calls`. Garbage collection is off during the rounds."""
    rounds = []
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats):
            start = clock()
            for _ in range(calls):
                function()
            rounds.append((clock() - start) / calls)
    finally:
        if enabled:
            gc.enable()
    return statistics.median(rounds)


def table(title: str, rows: list[Row]) -> str:
    """The rows as a Markdown table, ready for the README."""
    lines = [f"### {title}", "", "| what | measured | target | |", "|---|---|---|---|"]
    for row in rows:
        measured = NOT_MEASURED if row.value is None else f"{row.value:.3g} {row.unit}"
        lines.append(f"| {row.what} | {measured} | {row.target} | {row.note} |")
    return "\n".join(lines) + "\n"
