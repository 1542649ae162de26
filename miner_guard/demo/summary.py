"""Summarises the demo run from the guard's records."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miner_guard.record.words import known

_AVERAGED = 5
"""Number of steps at the start and at the end over which the summary averages the loss, because the
demo's small batches make it noisy."""


@dataclass(frozen=True)
class Usage:
    """The guard's resource usage, as accounted by the kernel."""

    cpu_s: float
    """CPU seconds of the supervisor and of its helper processes."""

    wall_s: float
    resident_mb: float


@dataclass(frozen=True)
class Summary:
    """The run's figures. A figure that the log does not contain is None."""

    steps: int
    loss_from: float | None
    loss_to: float | None
    p50_s: float | None
    p95_s: float | None
    blocked: int
    """Count of `UPLOAD BLOCKED` lines; the guard logs the same block at most once every five
    minutes."""

    asked: int
    """Blocking decisions in the ledger; 0 if it was unreadable."""

    verified: int
    failed: int
    restarts: int
    alarms: Mapping[str, int]
    """Counts of events above info level, by name, excluding uploads that the gate blocked."""

    hook_s: float | None
    """Seconds that the hook itself took during rank 0's steps."""

    hook_pct: float | None
    usage: Usage
    state: str | None = None
    """The last state: `FINISHED since 12:03 UTC: the miner finished its work`."""

    before: str | None = None
    """The next-to-last state without its cause. The last one of a demo is always its end."""


def summarise(
    records: Iterable[Mapping[str, Any]],
    costs: Mapping[str, Any] | None,
    usage: Usage,
    asked: int = 0,
) -> Summary:
    """Aggregate the records of one run. `costs` is status/monitoring_costs.json, None if
    unreadable."""
    counts: Counter[str] = Counter()
    alarms: Counter[str] = Counter()
    steps = 0
    losses: list[float] = []
    times: list[float] = []
    states: list[str] = []
    for record in records:
        event = str(record["event"])
        if event == "verdict_changed":
            states.append(str(record.get("headline")))
        counts[event] += 1
        if record["level"] not in ("debug", "info") and event != "upload_blocked":
            alarms[event] += 1
        if event == "inner_step" and record.get("rank") == 0:
            steps += 1
            # The log stores a non-finite loss as a word, such as NaN.
            losses += [float(v)] if (v := record.get("loss")) is not None else []
            times += [v] if (v := record.get("step_time_s")) is not None else []
    hook = ((costs or {}).get("operations") or {}).get("guard.hook") or {}
    return Summary(
        steps=steps,
        loss_from=_mean([v for v in losses if math.isfinite(v)][:_AVERAGED]),
        loss_to=_mean(losses[-_AVERAGED:]),
        p50_s=_quantile(times, 0.50),
        p95_s=_quantile(times, 0.95),
        blocked=counts["upload_blocked"],
        asked=asked,
        verified=counts["upload_succeeded"],
        failed=counts["upload_failed"],
        restarts=counts["miner_restarting"],
        alarms=alarms,
        hook_s=hook.get("total_time"),
        hook_pct=hook.get("percentage"),
        usage=usage,
        state=states[-1] if states else None,
        before=states[-2].partition(": ")[0] if len(states) > 1 else None,
    )


def lines(summary: Summary) -> list[str]:
    """The summary as lines of text."""
    s = summary
    alarms = ", ".join(f"{name} ×{count}" for name, count in sorted(s.alarms.items())) or "none"
    usage = s.usage
    before = f" (before: {s.before})" if s.before else ""
    asked = f" (asked {s.asked} times)" if s.asked > s.blocked else ""
    return [
        "=" * 80,
        "DEMO SUMMARY",
        "=" * 80,
        f"state       {known(s.state)}{before}",
        f"steps       {s.steps}" + (f", restarts {s.restarts}" if s.restarts else ""),
        (
            f"loss        from {known(s.loss_from, '.2f')} to {known(s.loss_to, '.2f')} "
            f"(mean of {_AVERAGED} steps)"
        ),
        f"step time   p50 {_seconds(s.p50_s)}, p95 {_seconds(s.p95_s)}",
        f"uploads     blocked {s.blocked}{asked}, verified {s.verified}"
        + (f", failed {s.failed}" if s.failed else ""),
        f"guard cost  in the ranks {_in_the_ranks(s)}; outside them {usage.cpu_s:.1f}s of CPU in "
        f"{usage.wall_s:.0f}s ({100 * usage.cpu_s / usage.wall_s:.1f}% of a core), "
        f"{usage.resident_mb:.0f} MB",
        f"alarms      {alarms}",
        "=" * 80,
    ]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value with at least `share` of all values at or below it (nearest rank)."""
    return sorted(values)[max(0, -(-len(values) * int(100 * share) // 100) - 1)] if values else None


def _in_the_ranks(s: Summary) -> str:
    if s.hook_s is None or s.hook_pct is None:
        return "unknown"
    return f"{s.hook_s:.3f}s ({s.hook_pct:.3f}% of training)"


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}s"
