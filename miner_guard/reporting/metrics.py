"""Renders status.json as Prometheus metrics: base units, ratios 0-1, `_total` on counters only.
Unknown values are absent."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from miner_guard.detectors.verdict_conditions import STATES
from miner_guard.eventlog.catalog import CATALOGUE
from miner_guard.eventlog.status_document import (
    ChainStatus,
    CostsStatus,
    HealthStatus,
    JobStatus,
    StatusDocument,
    StepsStatus,
    UploadsStatus,
    VerdictStatus,
)
from miner_guard.system.clock import parse_iso_utc

PREFIX = "minerguard_"
VERDICT_LEVELS = {state: level for level, state in enumerate(reversed(STATES))}
"""The number of each state: 0 for the best, so that the maximum over a fleet is its worst miner."""

Row = tuple[Sequence[str], Any]

_GPU = {
    "memory_used_bytes": ("gpu_memory_used_bytes", 1.0),
    "memory_total_bytes": ("gpu_memory_total_bytes", 1.0),
    "utilization_ratio": ("gpu_utilization_ratio", 1.0),
    "temperature_c": ("gpu_temperature_celsius", 1.0),
    "power_w": ("gpu_power_watts", 1.0),
}
_HOST = {
    "cpu_pct": ("host_cpu_ratio", 0.01),
    "load1": ("host_load1", 1.0),
    "memory_used_bytes": ("host_memory_used_bytes", 1.0),
    "memory_limit_bytes": ("host_memory_limit_bytes", 1.0),
    "swap_used_bytes": ("host_swap_used_bytes", 1.0),
    "disk_free_bytes": ("host_disk_free_bytes", 1.0),
    "shm_total_bytes": ("host_shm_size_bytes", 1.0),
    "shm_used_bytes": ("host_shm_used_bytes", 1.0),
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


def text(status: StatusDocument, *, version: str, age_s: float) -> bytes:
    """The metrics in Prometheus' text format. `age_s`: the age of status.json, exported so that a
    scrape shows when the guard has stopped writing."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status, version, age_s))
    return generate_latest(registry)


def families(status: StatusDocument, *, version: str, age_s: float) -> Iterator[Metric]:
    """The metrics of `text`, before they are rendered."""
    return _Collector(status, version, age_s).collect()


class _Collector:
    def __init__(self, status: StatusDocument, version: str, age_s: float) -> None:
        self._status, self._version, self._age_s = status, version, age_s

    def collect(self) -> Iterator[Metric]:
        status = self._status
        info = InfoMetricFamily(f"{PREFIX}build", "Version and run.")
        info.add_metric([], {"version": self._version, "run_id": str(status.run_id)})
        yield info
        yield from _gauge(
            "status_age_seconds", "Age of the guard's last status.", [((), self._age_s)]
        )
        yield from _verdict(status.verdict or VerdictStatus())
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


def _family(
    family: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    words: str,
    rows: Sequence[Row],
    *,
    labels: Sequence[str] = (),
) -> Iterator[Metric]:
    known = [(keys, float(value)) for keys, value in rows if isinstance(value, (int, float))]
    if known:
        metric = family(PREFIX + name, words, labels=labels)
        for keys, value in known:
            metric.add_metric(list(keys), value)
        yield metric


_gauge = functools.partial(_family, GaugeMetricFamily)
_counter = functools.partial(_family, CounterMetricFamily)


def _verdict(verdict: VerdictStatus) -> Iterator[Metric]:
    state = verdict.state
    level = VERDICT_LEVELS.get(str(state))
    words = "0 earning, 1 unknown, 2 degraded, 3 not earning, 4 stopped."
    yield from _gauge("verdict_level", words, [((), level)])
    since = _seconds(verdict.since)
    yield from _gauge(
        "verdict_since_timestamp_seconds",
        "When the current verdict began, Unix time.",
        [((), since)],
    )
    cause = [((verdict.key,), 1)] if verdict.key else []
    yield from _gauge(
        "verdict_cause", "1 for the condition that determines the verdict.", cause, labels=["key"]
    )


def _without_progress(status: StatusDocument) -> Iterator[Metric]:
    """Ages that are defined even before the first step and the first push: an alert on a metric
    that does not exist yet could never fire."""
    updated = _seconds(status.updated)
    began = _seconds(status.metrics.since)
    run_s = None if updated is None or began is None else updated - began
    step_age = status.steps.last_step_age_s
    repo = status.uploads.repo
    published = run_s if repo.empty else repo.age_s
    yield from _gauge(
        "no_step_seconds",
        "Age of the last step; before the first step, of this guard.",
        [((), run_s if step_age is None else step_age)],
    )
    yield from _gauge(
        "no_upload_seconds",
        "Age of what is published; while the repo is empty, of this guard.",
        [((), published)],
    )


def _chain(chain: ChainStatus) -> Iterator[Metric]:
    registered = chain.registered
    yield from _gauge("chain_block", "Newest block seen.", [((), chain.block)])
    yield from _gauge(
        "chain_registered",
        "1 if the hotkey is registered on the subnet, else 0.",
        [((), None if registered is None else int(registered))],
    )
    yield from _gauge("chain_incentive", "As validators set it.", [((), chain.incentive)])
    yield from _gauge("chain_rank", "The miner's rank on the chain.", [((), chain.chain_rank)])


def _run(status: StatusDocument) -> Iterator[Metric]:
    state = status.state
    yield from _gauge("miner_running", "1 while the miner runs.", [((), int(state == "running"))])
    yield from _gauge(
        "miner_state",
        "1 for the current state of the miner.",
        [((str(state),), 1)],
        labels=["state"],
    )
    on_cpu = status.ranks.cpu_fallback.values()
    certain = sum(1 for seen in on_cpu if seen.verdict == "certain")
    yield from _gauge("cpu_fallback_ranks", "Ranks that compute on the CPU.", [((), certain)])
    yield from _gauge(
        "ranks", "Ranks that report to the guard.", [((), len(status.rank_processes))]
    )
    yield from _counter(
        "miner_launches", "Launches of the miner in this run.", [((), (status.attempt or 0) + 1)]
    )
    yield from _gauge(
        "miner_failures", "Restarts since the miner was last healthy.", [((), status.restarts)]
    )


def _steps(steps: StepsStatus) -> Iterator[Metric]:
    for key, name in _STEPS.items():
        yield from _gauge(
            name,
            f"{name.replace('_', ' ')} of the lead rank.",
            [((), _measured(getattr(steps, key)))],
        )
    yield from _counter("steps", "Inner steps seen by this guard.", [((), steps.steps)])
    yield from _gauge("step_p50_seconds", "Median of the recent steps.", [((), steps.p50_s)])
    yield from _gauge(
        "step_p95_seconds", "95th percentile of the recent steps.", [((), steps.p95_s)]
    )
    shares = [((name,), share) for name, share in steps.goodput.items()]
    yield from _gauge(
        "time_ratio",
        "Share of wall time by category; training is goodput.",
        shares,
        labels=["category"],
    )
    ranks = steps.per_rank.items()
    for key, name in (
        ("step_time_s", "rank_step_seconds"),
        ("last_step_age_s", "rank_last_step_age_seconds"),
    ):
        yield from _gauge(
            name, "By rank.", [((rank,), getattr(row, key)) for rank, row in ranks], labels=["rank"]
        )


def _uploads(uploads: UploadsStatus) -> Iterator[Metric]:
    repo = uploads.repo
    yield from _gauge("repo_age_seconds", "Age of what is published.", [((), repo.age_s)])
    yield from _gauge(
        "repo_age_limit_seconds", "Age from which the repo is stale.", [((), repo.limit_s)]
    )
    stale = repo.stale
    yield from _gauge(
        "repo_stale",
        "1 if the repo is older than its limit.",
        [((), None if stale is None else int(stale))],
    )
    audit = uploads.audit and uploads.audit.outcome
    rejected = None if audit not in ("accepted", "rejected") else int(audit == "rejected")
    yield from _gauge(
        "audit_rejected",
        "1 if validators would reject what is published, else 0.",
        [((), rejected)],
    )


def _gpus(gpus: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    labels = ["gpu", "uuid"]
    keys = [(str(row.get("index")), str(row.get("uuid") or "")) for row in gpus]
    ok = [(key, int(row.get("state") == "ok")) for key, row in zip(keys, gpus, strict=True)]
    yield from _gauge("gpu_up", "1 if the GPU answers, else 0.", ok, labels=labels)
    for field, (name, factor) in _GPU.items():
        rows = [(key, _scaled(row.get(field), factor)) for key, row in zip(keys, gpus, strict=True)]
        yield from _gauge(name, f"{field} as NVML reports it.", rows, labels=labels)


def _host(host: Mapping[str, Any]) -> Iterator[Metric]:
    for field, (name, factor) in _HOST.items():
        yield from _gauge(
            name, f"{field} of the host or its cgroup.", [((), _scaled(host.get(field), factor))]
        )
    yield from _counter(
        "host_oom_kills", "Out-of-memory kills in this cgroup.", [((), host.get("oom_kills"))]
    )
    both = [
        (("sent",), host.get("network_sent_bytes")),
        (("received",), host.get("network_received_bytes")),
    ]
    yield from _counter(
        "host_network_bytes",
        "Bytes over all network interfaces except lo.",
        both,
        labels=["direction"],
    )


def _guard(health: HealthStatus) -> Iterator[Metric]:
    own = health.guard
    yield from _counter(
        "guard_cpu_seconds",
        "CPU time of the supervisor and of the processes that it started for itself.",
        [((), own.get("cpu_s"))],
    )
    yield from _gauge(
        "guard_memory_bytes", "Resident memory of the supervisor.", [((), own.get("memory_bytes"))]
    )
    yield from _counter(
        "guard_events_dropped", "Datagrams the ranks dropped.", [((), health.events_dropped)]
    )
    failing = [((name,), 1) for name in health.unknown]
    yield from _gauge(
        "sampler_failing", "1 for a sampler that does not answer.", failing, labels=["sampler"]
    )


def _jobs(jobs: Mapping[str, JobStatus]) -> Iterator[Metric]:
    rows = jobs.items()
    last, missed = (
        [((name,), getattr(row, key)) for name, row in rows] for key in ("last_s", "missed")
    )
    yield from _gauge("job_seconds", "How long the job's last run took.", last, labels=["job"])
    yield from _counter("job_missed", "Skipped runs of the job.", missed, labels=["job"])


def _costs(costs: CostsStatus) -> Iterator[Metric]:
    yield from _gauge(
        "monitoring_ratio", "Monitoring / training time.", [((), _scaled(costs.share_pct, 0.01))]
    )
    budget = _scaled(costs.budget_pct, 0.01)
    yield from _gauge(
        "monitoring_budget_ratio", "Budget for monitoring / training time.", [((), budget)]
    )
    operations = costs.operations.items()
    blocking = [((name,), row.get("total_time")) for name, row in operations]
    background = [((name,), row.get("background_time")) for name, row in operations]
    label = ["operation"]
    yield from _counter(
        "monitoring_blocking_seconds",
        "Time that the operation blocked training.",
        blocking,
        labels=label,
    )
    yield from _counter(
        "monitoring_background_seconds",
        "CPU time that the operation used alongside training.",
        background,
        labels=label,
    )


def _events(events: Mapping[str, Any]) -> Iterator[Metric]:
    # Export zeros too: a counter that first appears at 1 hides that event from `increase()`.
    rows = [((name,), events.get(name, 0)) for name in sorted(CATALOGUE)]
    yield from _counter("events", "Events logged in this run.", rows, labels=["event"])


def _seconds(iso: Any) -> float | None:
    """Convert an ISO time to seconds since 1970; None for anything else."""
    try:
        return parse_iso_utc(str(iso)) if iso else None
    except ValueError:
        return None


def _measured(value: Any) -> Any:
    """`NaN` and `Infinity` as floats: Prometheus can express them, JSON cannot."""
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _scaled(value: Any, factor: float) -> float | None:
    return float(value) * factor if isinstance(value, (int, float)) else None
