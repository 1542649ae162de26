"""Figures of the judges of curves, live and after the fact: `python -m tests.curve_figures FILE
[--wrong]`.

FILE has one labelled real curve a line (JSON: kind, steps, values, eval_steps, eval_values, lr,
grad_norm, labels). Counts the labelled anomalies that are found at their step, and the quiet curves
that raise an alarm; then the same for anomalies inserted into synthetic curves.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miner_guard.config import LossSettings
from miner_guard.watch import trace_reading as reading
from miner_guard.watch.curves import Anomaly, LossWatch, MemoryWatch, OverfitWatch, judge
from tests.support import curve_judges

QUANTITY = {"loss": "loss", "step_time": "step_time", "memory": "gpu_mem_gb"}
SILENT = {"healthy", "converged", "resumed", "nan_grad"}
NAMES = {"memory_growth": "memory_leak"}

DELAY = {"overfit": 0.05, "divergence": 0.05}
"""How far an event may be from its label, as a share of the run: both are judged on a smoothed
curve."""

VALUES_OFF = 2
"""Every event may be up to this many values away from its label."""

Record = dict[str, Any]


@dataclass
class Figures:
    """What a judge finds in labelled curves."""

    at_label: collections.Counter[str] = field(default_factory=collections.Counter)
    anywhere: collections.Counter[str] = field(default_factory=collections.Counter)
    """Labels of whose type anything is found in the curve: live, an alarm comes later."""

    labelled: collections.Counter[str] = field(default_factory=collections.Counter)
    quiet: int = 0
    alarmed: int = 0
    """Quiet curves that raise an alarm."""

    wrong: list[str] = field(default_factory=list)


def records(file: Path) -> list[Record]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def lines(record: Record) -> Iterator[str]:
    """A labelled curve, as lines that `explain --trace` can read."""
    rows: dict[Any, dict[str, Any]] = {}
    extra = [record.get("lr") or [], record.get("grad_norm") or []]
    name = QUANTITY[record["kind"]]
    for step, value, lr, norm in itertools.zip_longest(record["steps"], record["values"], *extra):
        rows[step] = {"step": step, name: value, "lr": lr, "grad_norm": norm}
    for step, value in zip(record["eval_steps"] or (), record["eval_values"] or (), strict=True):
        rows.setdefault(step, {"step": step})["eval_loss"] = value
    for step in sorted(rows):
        yield json.dumps(rows[step])


def labels(record: Record) -> Iterator[tuple[str, float, float]]:
    """(type, from, to) of each labelled anomaly, in steps."""
    for label in record["labels"]:
        if label["type"] in SILENT:
            continue
        kind = NAMES.get(label["type"], label["type"])
        if label["at_steps"]:
            length = record["steps"][-1] - record["steps"][0]
            own = record["eval_steps"] if kind == "overfit" else record["steps"]
            stride = length / max(1, len(own) - 1)
            off = max(VALUES_OFF * stride, DELAY.get(kind, 0) * length)
            yield from ((kind, step - off, step + off) for step in label["at_steps"])
        else:
            yield kind, *label["range_steps"]


def after_the_fact(record: Record) -> list[Anomaly]:
    """The findings of `explain --trace`."""
    return judge(reading.read(lines(record)))


def live_at_15_s(record: Record) -> list[Anomaly]:
    """The same if the usual step took 15 s, for curves of step times: most of the corpus are steps
    of less than a second, whose outliers are too short to report live."""
    if record["kind"] != "step_time":
        return live(record)
    scale = 15 / statistics.median(record["values"])
    return live({**record, "values": [scale * v for v in record["values"]], "note": ""})


def live(record: Record) -> list[Anomaly]:
    """The findings of the running guard, value by value."""
    steps = [int(step) for step in record["steps"]]
    values = [float(value) for value in record["values"]]
    if record["kind"] == "step_time":
        # Live, 60 s are slow; some curves are in milliseconds.
        values = [v / 1e3 for v in values] if "ms/step" in record["note"] else values
        return [
            Anomaly(kind, steps[index], "warning" if certain else "info", "")
            for kind, index, certain in curve_judges.live_step_findings(values)
        ]
    if record["kind"] == "memory":
        memory = MemoryWatch()
        return [a for s, v in zip(steps, values, strict=True) if (a := memory.observe(s, v))]
    watch, over = LossWatch(LossSettings()), OverfitWatch()
    norms = [float("nan" if n is None else n) for n in record["grad_norm"] or ()]
    if all(map(math.isnan, norms)) and any(values):
        # Not logged.
        norms = []
    rows = itertools.zip_longest(steps, values, norms)
    found = [a for s, v, n in rows for a in watch.observe(s, v, n)]
    for step, value in zip(record["eval_steps"] or (), record["eval_values"] or (), strict=True):
        place = bisect_right(record["steps"], step)
        recent = [v for v in values[max(0, place - 16) : place] if math.isfinite(v)]
        if recent and value is not None:
            anomaly = over.observe(int(step), float(value), statistics.median(recent))
            found += [] if anomaly is None else [anomaly]
    return found


def measure(curves: list[Record], judge_one: Callable[[Record], list[Anomaly]]) -> Figures:
    """The figures of one judge."""
    seen = Figures()
    for record in curves:
        found, expected = judge_one(record), list(labels(record))
        for kind, first, last in expected:
            steps = [a.at_step for a in found if a.type == kind]
            hit = any(first <= step <= last for step in steps)
            seen.labelled[kind] += 1
            seen.at_label[kind] += hit
            seen.anywhere[kind] += bool(steps)
            if not hit:
                words = f"{record['id']} {kind} at {first:g}-{last:g}; found at {steps[:5]}"
                seen.wrong.append(f"missed: {words}")
        if not expected:
            alarms = [a for a in found if a.severity != "info"]
            seen.quiet, seen.alarmed = seen.quiet + 1, seen.alarmed + bool(alarms)
            seen.wrong += [
                f"false: {record['id']} {a.type} at {a.at_step} {a.detail}" for a in alarms[:3]
            ]
    return seen


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--wrong", action="store_true", help="list misses and false alarms")
    options = parser.parse_args()
    curves = records(options.file)
    ways = {"after the fact": after_the_fact, "live": live, "live at 15 s": live_at_15_s}
    for title, judge_one in ways.items():
        seen = measure(curves, judge_one)
        print(f"{title}: {seen.alarmed} of {seen.quiet} quiet curves alarmed")
        for kind, count in sorted(seen.labelled.items()):
            at, anywhere = seen.at_label[kind], seen.anywhere[kind]
            print(f"  {kind:14} {at} of {count} at their step, {anywhere} anywhere")
        print(*(seen.wrong if options.wrong else ()), sep="\n", end="\n" * options.wrong)
    for title, judges in (("after the fact", curve_judges.WHOLE), ("live", curve_judges.LIVE)):
        report = curve_judges.report(judges, 3)
        print(f"synthetic, {title}: {report.quiet_share:.1%} of the quiet curves alarmed")
        for anomaly, (hits, count) in report.found.items():
            alarms = report.alarms[anomaly]
            print(f"  {anomaly:14} {hits} of {count}, {alarms:.2f} alarms per curve")


if __name__ == "__main__":
    main()
