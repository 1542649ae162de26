"""Renders the present state as Prometheus metrics: base units, ratios 0-1, `_total` on counters.
Unknown values are absent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.samples import Exemplar

from miner_guard.record.status_document import Histogram, StatusDocument
from miner_guard.show.runbook import rows
from miner_guard.system.clock import parse_iso_utc
from miner_guard.watch.state_words import GREEN, GREY, LIVES, RED, YELLOW, read_state

PREFIX = "minerguard_"
LEVELS = {GREEN: 0, GREY: 1, YELLOW: 2, RED: 3}
"""Maps each colour to a number, so that the maximum over a fleet shows its worst miner."""

_GPU = {
    "memory_used_bytes": "gpu_memory_used_bytes",
    "memory_total_bytes": "gpu_memory_total_bytes",
    "utilization_ratio": "gpu_utilization_ratio",
    "temperature_c": "gpu_temperature_celsius",
    "power_w": "gpu_power_watts",
}
_HOST = {
    "memory_used_bytes": "host_memory_used_bytes",
    "memory_limit_bytes": "host_memory_limit_bytes",
    "disk_free_bytes": "host_disk_free_bytes",
}
_STEPS = {
    "outer_step": "outer_step",
    "inner_step": "inner_step",
    "loss": "loss",
    "lr": "learning_rate",
    "grad_norm": "gradient_norm",
    "tokens_per_s": "tokens_per_second",
}

HISTOGRAMS = {
    "step_seconds": "Step times of the lead rank.",
    "upload_seconds": "Durations of uploads that were verified.",
    "recovery_seconds": "From the report of a hang to the next step.",
}
_HOTKEY_CHARACTERS = 8

Scalar = tuple[str, str, Any]
"""Name, description and value."""

Table = tuple[str, str, tuple[str, ...], Mapping[Any, Any]]
"""Name, description, labels, and the value for each value of the label or labels."""


def exposition(status: StatusDocument, *, version: str, accept: str = "") -> tuple[bytes, str]:
    """The metrics as Prometheus or OpenMetrics text, whichever the `Accept` header prefers, and
    their content type. Each sample says whose it is."""
    encode, content_type = choose_encoder(accept)
    return encode(Families(status, version, identity(status))), content_type


def identity(status: StatusDocument) -> dict[str, str]:
    """The labels that name the miner. They are known from the start and stay: a label that comes
    later would begin a new series, in which `increase()` misses the first event."""
    chain = status.chain
    netuid = "" if chain.netuid is None else str(chain.netuid)
    hotkey = (chain.hotkey or "")[:_HOTKEY_CHARACTERS]
    named = {"miner": status.name, "node": status.host, "netuid": netuid, "hotkey": hotkey}
    return {label: value for label, value in named.items() if value}


class Families:
    """The metrics of a status, each sample with the labels of `identity`."""

    def __init__(
        self, status: StatusDocument, version: str, identity: Mapping[str, str] | None = None
    ) -> None:
        self._status, self._version, self._identity = status, version, identity or {}

    def collect(self) -> Iterator[Metric]:
        status = self._status
        # The uid is learned later and changes: as a label of each sample it would begin new series.
        uid = {} if status.chain.uid is None else {"uid": str(status.chain.uid)}
        yield self._info({"version": self._version, "run_id": str(status.run_id), **uid})
        for name, words, value in _gauges(status):
            yield from self._family(GaugeMetricFamily, (name, words, (), {(): value}))
        for name, words, value in _counters(status):
            yield from self._family(CounterMetricFamily, (name, words, (), {(): value}))
        for table in (*_tables(status), *_of_gpus(status)):
            yield from self._family(GaugeMetricFamily, table)
        # Export zeros too: a counter that first appears at 1 hides that event from `increase()`.
        counts = {**dict.fromkeys(rows(), 0), **status.metrics.events}
        words = "Events logged in this run."
        in_order = dict(sorted(counts.items()))
        yield from self._family(CounterMetricFamily, ("events", words, ("event",), in_order))
        for name, words in HISTOGRAMS.items():
            yield from self._histogram(name, words, status.metrics.histograms.get(name))

    def _info(self, values: dict[str, str]) -> Metric:
        info = InfoMetricFamily(f"{PREFIX}build", "Version, run and uid.", labels=[*self._identity])
        info.add_metric(list(self._identity.values()), values)
        return info

    def _family(self, kind: Any, table: Table) -> Iterator[Metric]:
        """One metric with a sample for each known value; nothing if none is known."""
        name, words, labels, samples = table
        measured = {key: float(v) for key, v in samples.items() if isinstance(v, (int, float))}
        if not measured:
            return
        metric = kind(PREFIX + name, words, labels=(*labels, *self._identity))
        for key, value in measured.items():
            values = [*(key if isinstance(key, tuple) else [key]), *self._identity.values()]
            exemplar = self._exemplar() if key == "incident" and value else None
            metric.add_metric(values, value, **({"exemplar": exemplar} if exemplar else {}))
        yield metric

    def _exemplar(self) -> Exemplar | None:
        """OpenMetrics' link from the count of incidents to the latest one."""
        incident = self._status.uploads.incident
        if incident is None or incident.label is None:
            return None
        rank = {} if incident.rank is None else {"rank": str(incident.rank)}
        return Exemplar({"label": incident.label, **rank}, 1.0, incident.wall)

    def _histogram(self, name: str, words: str, counted: Histogram | None) -> Iterator[Metric]:
        if counted is not None:
            metric = HistogramMetricFamily(PREFIX + name, words, labels=[*self._identity])
            buckets = list(counted.buckets.items())
            metric.add_metric(list(self._identity.values()), buckets, counted.sum)
            yield metric


def _gauges(status: StatusDocument) -> Iterator[Scalar]:
    state = read_state(status)
    yield "status_age_seconds", "Age of the status; it grows once the guard is stuck.", status.age_s
    words = "0 well, 1 starting or ended as asked, 2 degraded or at risk, 3 failing."
    yield "verdict_level", words, LEVELS.get(str(state.colour))
    began = _seconds(state.since)
    yield "verdict_since_timestamp_seconds", "Unix time of the state's start.", began
    yield "miner_running", "1 while the miner is running.", status.state == "running"
    on_cpu = sum(row.verdict == "certain" for row in status.ranks.cpu_fallback.values())
    yield "cpu_fallback_ranks", "Ranks that compute on the CPU.", on_cpu
    yield "ranks", "Ranks that report to the guard.", len(status.rank_processes)

    uploads, repo, chain, costs = status.uploads, status.uploads.repo, status.chain, status.costs
    yield "repo_age_seconds", "Age of the published files.", repo.age_s
    yield "repo_age_limit_seconds", "Age at which the repo becomes stale.", repo.limit_s
    outcome = {"accepted": 0, "rejected": 1}.get(str(uploads.audit and uploads.audit.outcome))
    yield "audit_rejected", "1 if validators would reject the published files, else 0.", outcome
    yield "chain_block", "Newest block seen.", chain.block
    yield "chain_registered", "1 if the hotkey is on the subnet, else 0.", chain.registered
    yield "chain_incentive", "Incentive set by validators.", chain.incentive
    yield "monitoring_ratio", "Monitoring time over training time.", _share(costs.share_pct)
    yield (
        "monitoring_budget_ratio",
        "Highest share that monitoring may take.",
        _share(costs.budget_pct),
    )

    for key, name in _STEPS.items():
        value = _measured(getattr(status.steps, key))
        yield name, f"{name.replace('_', ' ')} of the lead rank.", value
    # Defined before the first step and the first push too: an alert on a metric that does not exist
    # yet could never fire.
    updated, began = _seconds(status.updated), _seconds(status.metrics.since)
    run_s = None if updated is None or began is None else updated - began
    age_s = run_s if status.steps.last_step_age_s is None else status.steps.last_step_age_s
    yield "no_step_seconds", "Age of the last step, or of this guard before the first.", age_s
    age_s = run_s if repo.empty else repo.age_s
    yield (
        "no_upload_seconds",
        "Age of the published files, or of this guard before the first.",
        age_s,
    )

    host, guard = status.health.host, status.health.guard
    yield "host_cpu_ratio", "cpu_pct of the host or its cgroup.", _share(host.get("cpu_pct"))
    for key, name in _HOST.items():
        yield name, f"{key} of the host or its cgroup.", host.get(key)
    yield "guard_memory_bytes", "Resident memory of the guard.", guard.get("memory_bytes")


def _counters(status: StatusDocument) -> Iterator[Scalar]:
    words = "Restarts in this run, of the miner or, by its launcher, of the ranks in place."
    yield "restarts", words, status.restarts or 0
    yield "steps", "Inner steps seen by this guard.", status.steps.steps
    host, guard = status.health.host, status.health.guard
    yield "host_oom_kills", "Out-of-memory kills in this cgroup.", host.get("oom_kills")
    yield "guard_cpu_seconds", "CPU time of the guard and its helpers.", guard.get("cpu_s")


def _tables(status: StatusDocument) -> Iterable[Table]:
    state, ranks = read_state(status), status.steps.per_rank
    cause = {state.key: 1} if state.key else {}
    yield "verdict_cause", "1 for the condition that determines the state.", ("key",), cause
    lives = {life: life == state.life for life in LIVES}
    yield "life", "1 for what the run is doing, else 0.", ("life",), lives
    words = "1 for whether the miner is earning; absent if it publishes nothing."
    yield "earning", words, ("earning",), {state.earning: 1} if state.earning else {}
    spent = status.steps.goodput
    yield "time_ratio", "Share of wall time; training is goodput.", ("category",), spent
    took = {rank: row.step_time_s for rank, row in ranks.items()}
    yield "rank_step_seconds", "Last step time by rank.", ("rank",), took
    ages = {rank: row.last_step_age_s for rank, row in ranks.items()}
    yield "rank_last_step_age_seconds", "Age of the last step by rank.", ("rank",), ages


def _of_gpus(status: StatusDocument) -> Iterable[Table]:
    labels = ("gpu", "uuid")
    gpus = {
        (str(row.get("index")), str(row.get("uuid") or "")): row for row in status.health.gpus.gpus
    }
    up = {key: row.get("state") == "ok" for key, row in gpus.items()}
    yield "gpu_up", "1 if the GPU responds, else 0.", labels, up
    for field, name in _GPU.items():
        values = {key: row.get(field) for key, row in gpus.items()}
        yield name, f"{field} as NVML reports it.", labels, values


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
