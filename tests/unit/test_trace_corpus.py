"""Real curves: the labelled anomalies found, and how many healthy curves raise an alarm.

The corpus is other people's data next to the checkout; without it these tests are skipped.
`python -m tests.curve_figures` prints the figures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import curve_figures as figures

CORPUS = Path(__file__).resolve().parents[2].parent / "shared" / "corpus" / "traces.jsonl"
pytestmark = pytest.mark.skipif(not CORPUS.exists(), reason=f"no corpus of traces at {CORPUS}")

_OTHERWISE = {
    "memory_leak": 0,  # One curve, whose every growth of the allocator is labelled.
    "regime_change": 13,  # The others: a level of memory, and a slow drift.
}


def test_labelled_anomalies_are_found_and_healthy_runs_are_silent() -> None:
    seen = figures.measure(figures.records(CORPUS), figures.after_the_fact)
    assert (seen.alarmed, seen.quiet) == (0, 77), seen.wrong
    assert len(seen.labelled) == 9
    for kind, count in seen.labelled.items():
        assert seen.at_label[kind] >= _OTHERWISE.get(kind, 0.9 * count), seen.wrong


def test_the_live_judges_find_most_and_are_silent_on_the_rest() -> None:
    """A plateau of few values, or late in a run, is too short live. The step times of 27 curves are
    in milliseconds: taken for seconds, seven quiet ones exceeded the limit of 60 s."""
    curves = figures.records(CORPUS)
    assert figures.measure(curves, figures.live).alarmed == 0
    seen = figures.measure(curves, figures.live_at_15_s)
    assert seen.alarmed == 0, seen.wrong
    least = {"nan": 7, "spike": 51, "slow_steps": 269, "plateau_high": 5}
    assert all(seen.at_label[kind] >= count for kind, count in least.items()), seen.wrong
    assert seen.anywhere["overfit"] >= 9
    assert seen.anywhere["divergence"] >= 3


CUTS = {
    "first quarter": (0, 0.25, 1),
    "first half": (0, 0.5, 1),
    "last half": (0.5, 1, 1),
    "every third": (0, 1, 3),
}
"""From, to (shares of the run), stride."""


def test_cuts_of_healthy_runs_are_silent_too() -> None:
    """No detector was tuned on these curves: they are windows and thinned-out copies of the healthy
    ones."""
    curves = [r for r in figures.records(CORPUS) if not list(figures.labels(r))]
    parts = [cut(record, *shares) for record in curves for shares in CUTS.values()]
    seen = figures.measure(parts, figures.after_the_fact)
    assert seen.quiet == len(parts)
    # A cut can take away what made a curve healthy, such as a later recovery.
    assert seen.alarmed <= 0.03 * len(parts), seen.wrong


def cut(record: dict[str, Any], first: float, last: float, stride: int) -> dict[str, Any]:
    """Part of a record."""
    count = len(record["values"])
    part = slice(int(first * count), max(int(first * count) + 1, int(last * count)), stride)
    cut_off = {k: (record[k] or [])[part] for k in ("steps", "values", "lr", "grad_norm")}
    low, high = cut_off["steps"][0], cut_off["steps"][-1]
    pairs = zip(record["eval_steps"] or [], record["eval_values"] or [], strict=True)
    kept = [(step, value) for step, value in pairs if low <= step <= high]
    return {
        **record,
        **cut_off,
        "eval_steps": [s for s, _ in kept],
        "eval_values": [v for _, v in kept],
    }
