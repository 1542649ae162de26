"""`miner-guard explain --trace FILE [--json]`: anomalies in a run's numbers, and their fixes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer

from miner_guard import exits
from miner_guard.cli.echo import echo
from miner_guard.cli.files import open_text
from miner_guard.record.words import counted
from miner_guard.watch import trace as judge
from miner_guard.watch import trace_reading as reading
from miner_guard.watch.curves import Anomaly
from miner_guard.watch.progress import TrainingFacts
from miner_guard.watch.trace_reading import Trace

_ALIKE = 3
"""How many findings of each type to print in full. For the rest, only the steps are listed."""

_STEPS_SHOWN = 20


def explain_trace(source: str, facts: TrainingFacts, *, as_json: bool) -> None:
    """Explain the trace in the file `source` (`-`: standard input). Exits with 1 if it is
    healthy.

    `facts` contains the run's batch sizes, which are needed to name the examples that caused a NaN.
    Raises Refused (64) if the file can't be read or contains no trace line. A run whose only
    findings are remarks (severity info) counts as healthy."""
    with open_text(source, "a trace file") as lines:
        trace = reading.read(lines)
    if not trace.used:
        raise exits.Refused(
            f"{source}: no trace lines in {counted(trace.lines, 'line')}; pass JSON "
            'lines such as {"step": 10, "loss": 2.45, "step_time": 15.2}, guard.jsonl, CSV with a '
            "header such as `step,loss,lr`, or lines such as `Step 10: loss=2.45, lr=6.67e-05`",
            exits.USAGE,
        )
    found = judge.judge(trace, facts)
    if as_json:
        echo(json.dumps({"findings": [document(a) for a in found]}, ensure_ascii=False))
    else:
        for line in report(trace, found):
            echo(line)
    if all(a.severity == "info" for a in found):
        raise typer.Exit(exits.FAILED)


def document(anomaly: Anomaly) -> Mapping[str, Any]:
    """One finding as printed by `--json`."""
    return {
        "type": anomaly.type,
        "at_step": anomaly.at_step,
        "severity": anomaly.severity,
        "detail": anomaly.detail,
        "fixes": list(anomaly.fixes),
    }


def report(trace: Trace, found: Sequence[Anomaly]) -> Iterator[str]:
    """Yield the findings as lines of text. Each type appears once with its evidence and fixes;
    repeats are listed by step."""
    counts = ", ".join(
        f"{len(series)} {name}" for name, series in trace.series.items() if len(series)
    )
    yield f"{trace.used} of {trace.lines} lines read: {counts or 'no numbers'}"
    if not found:
        yield "Nothing wrong."
    for kind in dict.fromkeys(a.type for a in found):
        alike = [a for a in found if a.type == kind]
        for anomaly in alike[:_ALIKE]:
            yield f"{anomaly.severity.upper():8} {kind} at step {anomaly.at_step}: {anomaly.detail}"
        if len(alike) > _ALIKE:
            steps = [str(a.at_step) for a in alike[_ALIKE:]]
            more = f" and {len(steps) - _STEPS_SHOWN} more" if len(steps) > _STEPS_SHOWN else ""
            yield f"         also at steps {', '.join(steps[:_STEPS_SHOWN])}{more}"
        if alike[0].cause:
            yield f"         likely cause: {alike[0].cause}"
        for place, fix in enumerate(alike[0].fixes, 1):
            yield f"         {place}. {fix}"
    if any(a.severity != "info" for a in found):
        yield "Make one change at a time, and note what helped."
