"""Summarises the demo run from the guard's records."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from miner_guard.record.words import or_unknown

_AVERAGED = 5
"""Number of steps at the start and at the end over which the summary averages the loss, because the
demo's small batches make it noisy."""


def lines(
    records: Iterable[Mapping[str, Any]],
    costs: Mapping[str, Any] | None,
    incident: str = "",
    strip: str = "",
) -> list[str]:
    """The summary of one run's records as lines of text. `costs` is status/monitoring_costs.json,
    None if unreadable; `incident` is the last one's card, `strip` the states as cells."""
    counts: Counter[str] = Counter()
    alarms: Counter[str] = Counter()
    losses: list[float] = []
    times: list[float] = []
    state = None
    steps = 0
    for record in records:
        event = str(record["event"])
        counts[event] += 1
        if event == "verdict_changed":
            state = record.get("headline")
        if record["level"] not in ("debug", "info"):
            alarms[event] += 1
        if event == "inner_step" and record.get("rank") == 0:
            steps += 1
            # The log stores a non-finite loss as a word, such as NaN.
            losses += [float(v)] if (v := record.get("loss")) is not None else []
            times += [v] if (v := record.get("step_time_s")) is not None else []
    began = _mean([v for v in losses if math.isfinite(v)][:_AVERAGED])
    restarts, failed = counts["miner_restarting"], counts["upload_failed"]
    hook = ((costs or {}).get("operations") or {}).get("guard.hook")
    in_ranks = f"{hook['total_time']:.3f}s ({hook['percentage']:.3f}% of training)" if hook else ""
    names = ", ".join(f"{name} ×{count}" for name, count in sorted(alarms.items()))
    return [
        "=" * 80,
        "DEMO SUMMARY",
        "=" * 80,
        f"state       {or_unknown(state)}",
        f"steps       {steps}" + (f", restarts {restarts}" if restarts else ""),
        f"loss        from {or_unknown(began, '.2f')} to "
        f"{or_unknown(_mean(losses[-_AVERAGED:]), '.2f')} (mean of {_AVERAGED} steps)",
        f"step time   p50 {_quantile(times, 50)}, p95 {_quantile(times, 95)}",
        f"uploads     blocked {counts['upload_blocked']}, verified {counts['upload_succeeded']}"
        + (f", failed {failed}" if failed else ""),
        f"guard cost  in the ranks {in_ranks or 'unknown'}",
        f"alarms      {names or 'none'}",
        *([f"incident    {incident}"] if incident else []),
        *([f"strip       {strip}"] if strip else []),
        "=" * 80,
    ]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _quantile(values: Sequence[float], pct: int) -> str:
    """The smallest value with at least `pct` of all values at or below it (nearest rank)."""
    if not values:
        return "unknown"
    return f"{sorted(values)[max(0, -(-len(values) * pct // 100) - 1)]:.2f}s"
