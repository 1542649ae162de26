"""Renders the present state as Prometheus metrics: base units, ratios 0-1, `_total` on counters.
Unknown values are absent."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from miner_guard.record.status_document import (
    ChainStatus,
    CostsStatus,
    HealthStatus,
    JobStatus,
    RunState,
    StatusDocument,
    StepsStatus,
    UploadsStatus,
)
from miner_guard.show.runbook import rows
from miner_guard.system.clock import parse_iso_utc
from miner_guard.watch.state_words import GREEN, GREY, LIVES, RED, YELLOW, read_state

PREFIX = "minerguard_"
LEVELS = {GREEN: 0, GREY: 1, YELLOW: 2, RED: 3}
"""Maps each colour to a number, so that the maximum over a fleet shows its worst miner."""

Row = tuple[Sequence[str], Any]
Family = type[GaugeMetricFamily | CounterMetricFamily]

_GPU = {
    "memory_used_bytes": "gpu_memory_used_bytes",
    "memory_total_bytes": "gpu_memory_total_bytes",
    "utilization_ratio": "gpu_utilization_ratio",
    "temperature_c": "gpu_temperature_celsius",
    "power_w": "gpu_power_watts",
}
_HOST = {
    "cpu_pct": "host_cpu_ratio",
    "load1": "host_load1",
    "memory_used_bytes": "host_memory_used_bytes",
    "memory_limit_bytes": "host_memory_limit_bytes",
    "swap_used_bytes": "host_swap_used_bytes",
    "disk_free_bytes": "host_disk_free_bytes",
    "shm_total_bytes": "host_shm_size_bytes",
    "shm_used_bytes": "host_shm_used_bytes",
}
_STEPS = {
    "outer_step": "outer_step",
    "inner_step": "inner_step",
    "loss": "loss",
    "lr": "learning_rate",
    "grad_norm": "gradient_norm",
    "last_step_age_s": "last_step_age_seconds",
    "tokens_per_s": "tokens_per_second",
    "samples_per_s": "samples_per_second",
}


def text(status: StatusDocument, *, version: str) -> bytes:
    """The metrics in the Prometheus text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status, version))
    return generate_latest(registry)


def families(status: StatusDocument, *, version: str) -> Iterator[Metric]:
    """The metrics of `text`, before they are rendered."""
    return _Collector(status, version).collect()


class _Collector:
    def __init__(self, status: StatusDocument, version: str) -> None:
        self._status, self._version = status, version

    def collect(self) -> Iterator[Metric]:
        status = self._status
        info = InfoMetricFamily(f"{PREFIX}build", "Version and run.")
        info.add_metric([], {"version": self._version, "run_id": str(status.run_id)})
        yield info
        words = "Age of the guard's last status: it grows when the guard has stopped writing."
        yield from _gauges(("status_age_seconds", words, status.age_s))
        yield from _state(read_state(status))
        yield from _run(status)
        yield from _steps(status.steps)
        yield from _without_progress(status)
        yield from _uploads(status.uploads)
        yield from _gpus(status.health.gpus.gpus)
        yield from _host(status.health.host)
        yield from _guard(status.health)
        yield from _jobs(status.jobs)
        yield from _costs(status.costs)
        yield from _events(status.metrics.events)
        yield from _chain(status.chain)


def _labelled(
    name: str,
    words: str,
    labels: Sequence[str],
    rows: Iterable[Row],
    *,
    family: Family = GaugeMetricFamily,
) -> Iterator[Metric]:
    """Yield one metric with a sample per row; nothing if no value is known."""
    known = [(keys, float(value)) for keys, value in rows if isinstance(value, (int, float))]
    if known:
        metric = family(PREFIX + name, words, labels=labels)
        for keys, value in known:
            metric.add_metric(list(keys), value)
        yield metric


def _by(
    label: str,
    name: str,
    words: str,
    values: Mapping[str, Any],
    *,
    family: Family = GaugeMetricFamily,
) -> Iterator[Metric]:
    """Yield one metric with a sample for each value of `label`."""
    rows = [((key,), value) for key, value in values.items()]
    return _labelled(name, words, [label], rows, family=family)


def _gauges(*rows: tuple[str, str, Any], family: Family = GaugeMetricFamily) -> Iterator[Metric]:
    """Yield one unlabelled metric for each name, description and value."""
    for name, words, value in rows:
        yield from _labelled(name, words, (), [((), value)], family=family)


_counters = functools.partial(_gauges, family=CounterMetricFamily)


def _state(state: RunState) -> Iterator[Metric]:
    words = "0 well, 1 starting or ended as asked, 2 degraded or at risk, 3 failing."
    since = "Unix time at which the current state began."
    yield from _gauges(
        ("verdict_level", words, LEVELS.get(str(state.colour))),
        ("verdict_since_timestamp_seconds", since, _seconds(state.since)),
    )
    cause = {state.key: 1} if state.key else {}
    yield from _by("key", "verdict_cause", "1 for the condition that determines the state.", cause)
    words = "1 for what the run is doing, else 0."
    yield from _by("life", "life", words, {life: life == state.life for life in LIVES})
    words = "1 for whether the miner is earning; absent if it publishes nothing."
    yield from _by("earning", "earning", words, {state.earning: 1} if state.earning else {})


def _without_progress(status: StatusDocument) -> Iterator[Metric]:
    """Yield ages that are defined even before the first step and the first push: an alert on a
    metric that does not exist yet could never fire."""
    updated = _seconds(status.updated)
    began = _seconds(status.metrics.since)
    run_s = None if updated is None or began is None else updated - began
    step_age, repo = status.steps.last_step_age_s, status.uploads.repo
    yield from _gauges(
        (
            "no_step_seconds",
            "Age of the last step; before the first step, age of this guard.",
            run_s if step_age is None else step_age,
        ),
        (
            "no_upload_seconds",
            "Age of the published files; while the repo is empty, age of this guard.",
            run_s if repo.empty else repo.age_s,
        ),
    )


def _chain(chain: ChainStatus) -> Iterator[Metric]:
    words = "1 if the hotkey is registered on the subnet, else 0."
    return _gauges(
        ("chain_block", "Newest block seen.", chain.block),
        ("chain_registered", words, chain.registered),
        ("chain_incentive", "Incentive set by validators.", chain.incentive),
    )


def _run(status: StatusDocument) -> Iterator[Metric]:
    state = status.state
    yield from _gauges(("miner_running", "1 while the miner is running.", state == "running"))
    yield from _by("state", "miner_state", "1 for the current state of the miner.", {str(state): 1})
    on_cpu = status.ranks.cpu_fallback.values()
    certain = sum(1 for seen in on_cpu if seen.verdict == "certain")
    yield from _gauges(
        ("cpu_fallback_ranks", "Ranks that compute on the CPU.", certain),
        ("ranks", "Ranks that report to the guard.", len(status.rank_processes)),
    )
    launches = (status.attempt or 0) + 1
    yield from _counters(("miner_launches", "Launches of the miner in this run.", launches))
    words = "Restarts since the miner was last healthy."
    yield from _gauges(("miner_failures", words, status.restarts))


def _steps(steps: StepsStatus) -> Iterator[Metric]:
    for key, name in _STEPS.items():
        words = f"{name.replace('_', ' ')} of the lead rank."
        yield from _gauges((name, words, _measured(getattr(steps, key))))
    yield from _counters(("steps", "Inner steps seen by this guard.", steps.steps))
    yield from _gauges(
        ("step_p50_seconds", "Median of recent step times.", steps.p50_s),
        ("step_p95_seconds", "95th percentile of recent step times.", steps.p95_s),
    )
    words = "Share of wall time by category; training is goodput."
    yield from _by("category", "time_ratio", words, steps.goodput)
    ranks = steps.per_rank.items()
    took = {rank: row.step_time_s for rank, row in ranks}
    ages = {rank: row.last_step_age_s for rank, row in ranks}
    yield from _by("rank", "rank_step_seconds", "Last step time by rank.", took)
    yield from _by("rank", "rank_last_step_age_seconds", "Age of the last step by rank.", ages)


def _uploads(uploads: UploadsStatus) -> Iterator[Metric]:
    repo, outcome = uploads.repo, uploads.audit and uploads.audit.outcome
    rejected = {"accepted": 0, "rejected": 1}.get(str(outcome))
    words = "1 if validators would reject the published files, else 0."
    return _gauges(
        ("repo_age_seconds", "Age of the published files.", repo.age_s),
        ("repo_age_limit_seconds", "Age at which the repo becomes stale.", repo.limit_s),
        ("repo_stale", "1 if the repo is older than its limit.", repo.stale),
        ("audit_rejected", words, rejected),
    )


def _gpus(gpus: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    labels = ["gpu", "uuid"]
    keys = [(str(row.get("index")), str(row.get("uuid") or "")) for row in gpus]
    ok = [row.get("state") == "ok" for row in gpus]
    words = "1 if the GPU responds, else 0."
    yield from _labelled("gpu_up", words, labels, zip(keys, ok, strict=True))
    for field, name in _GPU.items():
        rows = zip(keys, (row.get(field) for row in gpus), strict=True)
        yield from _labelled(name, f"{field} as NVML reports it.", labels, rows)


def _host(host: Mapping[str, Any]) -> Iterator[Metric]:
    for field, name in _HOST.items():
        value = _share(host.get(field)) if field.endswith("_pct") else host.get(field)
        yield from _gauges((name, f"{field} of the host or its cgroup.", value))
    words = "Out-of-memory kills in this cgroup."
    yield from _counters(("host_oom_kills", words, host.get("oom_kills")))
    sent, received = host.get("network_sent_bytes"), host.get("network_received_bytes")
    both = {"sent": sent, "received": received}
    words = "Bytes over all network interfaces except lo."
    yield from _by("direction", "host_network_bytes", words, both, family=CounterMetricFamily)


def _guard(health: HealthStatus) -> Iterator[Metric]:
    own = health.guard
    words = "CPU time used by the supervisor and its helper processes."
    yield from _counters(("guard_cpu_seconds", words, own.get("cpu_s")))
    words = "Resident memory of the supervisor."
    yield from _gauges(("guard_memory_bytes", words, own.get("memory_bytes")))
    words = "Journal entries of the ranks that found no room."
    yield from _counters(("guard_entries_lost", words, health.entries_lost))
    failing = dict.fromkeys(health.unknown, 1)
    yield from _by("sampler", "sampler_failing", "1 if the sampler is not responding.", failing)


def _jobs(jobs: Mapping[str, JobStatus]) -> Iterator[Metric]:
    last = {name: job.last_s for name, job in jobs.items()}
    missed = {name: job.missed for name, job in jobs.items()}
    yield from _by("job", "job_seconds", "How long the job's last run took.", last)
    yield from _by(
        "job", "job_missed", "Skipped runs of the job.", missed, family=CounterMetricFamily
    )


def _costs(costs: CostsStatus) -> Iterator[Metric]:
    words = "Budget for monitoring time divided by training time."
    yield from _gauges(
        ("monitoring_ratio", "Monitoring time divided by training time.", _share(costs.share_pct)),
        ("monitoring_budget_ratio", words, _share(costs.budget_pct)),
    )
    for key, kind, words in (
        ("total_time", "blocking", "Time that the operation blocked training."),
        ("background_time", "background", "CPU time that the operation used alongside training."),
    ):
        seconds = {name: row.get(key) for name, row in costs.operations.items()}
        name = f"monitoring_{kind}_seconds"
        yield from _by("operation", name, words, seconds, family=CounterMetricFamily)


def _events(events: Mapping[str, Any]) -> Iterator[Metric]:
    # Export zeros too: a counter that first appears at 1 hides that event from `increase()`.
    counts = {name: events.get(name, 0) for name in sorted({*rows(), *events})}
    return _by("event", "events", "Events logged in this run.", counts, family=CounterMetricFamily)


def _seconds(iso: Any) -> float | None:
    """Convert an ISO time to seconds since 1970; None for anything else."""
    try:
        return parse_iso_utc(str(iso)) if iso else None
    except ValueError:
        return None


def _measured(value: Any) -> Any:
    """`NaN` and `Infinity` as floats: Prometheus can express them, JSON cannot."""
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _share(pct: Any) -> float | None:
    return pct / 100 if isinstance(pct, (int, float)) else None
