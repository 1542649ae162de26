"""The model of status.json: the guard writes it, every reader of the file parses it here.

What a reader cannot use reads as None or an empty section (`eventlog/section.py`). Field names are
the JSON names; units are in the names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miner_guard.eventlog.section import Section
from miner_guard.state_dir import StateDir, read_json


@dataclass(frozen=True)
class LastExit(Section):
    """The end of the previous launch."""

    code: int | None = None
    """As a shell reports it: 128 + n for signal n."""

    signal: int | None = None
    asked: bool | None = None
    """The guard requested the exit."""

    finished: bool | None = None
    runtime_s: float | None = None


@dataclass(frozen=True)
class RankProcess(Section):
    """The process of one rank."""

    pid: int | None = None
    local_rank: int | None = None


@dataclass(frozen=True)
class VerdictStatus(Section):
    """Whether the miner earns; written by the monitor `verdict`."""

    state: str | None = None
    """One of `detectors.verdict.STATES`."""

    since: str | None = None
    """UTC, ISO 8601."""

    cause: str | None = None
    next_step: str | None = None
    event: str | None = None
    confidence: str | None = None
    key: str | None = None
    week: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Seconds by state in cells of two hours, numbered from 1970 (`detectors.verdict_history`)."""


@dataclass(frozen=True)
class RankSteps(Section):
    """The latest step of one rank."""

    outer_step: int | None = None
    inner_step: int | None = None
    loss: float | str | None = None
    """A non-finite loss is the word `NaN`, `Infinity` or `-Infinity`."""

    step_time_s: float | None = None
    work_s: float | None = None
    """Seconds of the step without the rank's wait for the others: collectives give all ranks the
    same step time."""

    gpu_mem_gb: float | None = None
    gpu_peak_gb: float | None = None
    """The most that the rank's program had allocated at a time."""

    phases_s: Mapping[str, float] = field(default_factory=dict)
    last_step_age_s: float | None = None


@dataclass(frozen=True)
class StepsStatus(Section):
    """The lead rank's training; written by the monitor `steps`."""

    outer_step: int | None = None
    inner_step: int | None = None
    total_steps: int | None = None
    steps: int | None = None
    """Inner steps that this guard has seen."""

    loss: float | str | None = None
    """A non-finite loss is the word `NaN`, `Infinity` or `-Infinity`."""

    loss_first: float | str | None = None
    loss_last: float | str | None = None
    lr: float | None = None
    grad_norm: float | str | None = None
    gpu_mem_gb: float | None = None
    memory_grade: str | None = None
    """`detectors.gpu_use.memory_grade` of the last step's allocated memory."""

    step_time_s: float | None = None
    last_step_age_s: float | None = None
    phase: str | None = None
    """The lead rank's phase now."""

    p50_s: float | None = None
    p95_s: float | None = None
    max_s: float | None = None
    max_at_inner_step: int | None = None
    grade: str | None = None
    """`detectors.step_time.grade` of the median."""

    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    eta_upload_s: float | None = None
    eta_outer_s: float | None = None
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Shares of wall time by category, 0-1; `training` is goodput."""

    per_rank: Mapping[str, RankSteps] = field(default_factory=dict)


NO_REPO = "no repo is configured; set [repo] kind"
"""`RepoStatus.reason` where there is nothing to read."""


@dataclass(frozen=True)
class RepoStatus(Section):
    """What is published."""

    age_s: float | None = None
    reason: str | None = None
    """Why the age is unknown."""

    empty: bool | None = None
    revision: str | None = None
    outer_step: int | None = None
    inner_step: int | None = None
    due: bool | None = None
    stale: bool | None = None
    limit_s: float | None = None


@dataclass(frozen=True)
class ForecastStatus(Section):
    """`uploads.forecast.Forecast`."""

    min_inner_step: int | None = None
    eta_s: float | None = None
    stale_s: float | None = None
    accepted_from: int | None = None
    waiting_costs_s: float | None = None
    late: bool | None = None


@dataclass(frozen=True)
class LastDecision(Section):
    """The gate's latest decision."""

    decision_id: str | None = None
    allowed: bool | None = None
    reason: str | None = None
    decided_at: float | None = None
    """Seconds since 1970."""

    note: str | None = None


@dataclass(frozen=True)
class LastUpload(Section):
    """The latest upload of the ledger."""

    outcome: str | None = None
    tag: str | None = None
    bytes: int | None = None
    seconds: float | None = None
    error: str | None = None
    wall: float | None = None
    """Seconds since 1970, here and in the classes below."""


@dataclass(frozen=True)
class LastAudit(Section):
    """The latest audit's result."""

    outcome: str | None = None
    detail: str | None = None
    wall: float | None = None


@dataclass(frozen=True)
class LastIncident(Section):
    """The latest incident."""

    label: str | None = None
    rank: int | None = None
    wall: float | None = None


@dataclass(frozen=True)
class LastRestart(Section):
    """The latest restart of the miner."""

    cause: str | None = None
    attempt: int | None = None
    wall: float | None = None


@dataclass(frozen=True)
class UploadsStatus(Section):
    """The repo and the latest rows of the ledger; written by the monitor `uploads`."""

    repo_age_s: float | None = None
    repo: RepoStatus = field(default_factory=RepoStatus)
    forecast: ForecastStatus | None = None
    pending: int | None = None
    """Reported pushes that await verification."""

    decision: LastDecision | None = None
    upload: LastUpload | None = None
    audit: LastAudit | None = None
    incident: LastIncident | None = None
    restart: LastRestart | None = None


@dataclass(frozen=True)
class GpusStatus(Section):
    """NVML's latest sample; the rows' fields are those of `health.nvml_fields`."""

    state: str | None = None
    """`ok`, `absent` or `unknown`."""

    reason: str | None = None
    taken: float | None = None
    """Monotonic seconds."""

    gpus: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class HealthStatus(Section):
    """Readings of the samplers; written by the monitor `health`."""

    host: Mapping[str, Any] = field(default_factory=dict)
    """The figures of `health.host`."""

    gpus: GpusStatus = field(default_factory=GpusStatus)
    guard: Mapping[str, Any] = field(default_factory=dict)
    """The figures of `health.own`."""

    unknown: Mapping[str, str] = field(default_factory=dict)
    """Reasons by sampler."""

    snapshots: int | None = None
    events_dropped: int | None = None
    entries_lost: int | None = None

    def without_gpu(self) -> str:
        """Why no GPU is listed, in words: there is none, or the guard cannot tell."""
        gpus = self.gpus
        if gpus.state == "absent":
            return f"no GPU: this machine has no NVIDIA driver ({gpus.reason})"
        if gpus.state == "ok":
            return "no GPU: the NVIDIA driver lists none"
        return f"unknown: {self.unknown.get('gpus') or gpus.reason or 'not read yet'}"


@dataclass(frozen=True)
class HangStatus(Section):
    """The hang detector; written by the monitor `hang`."""

    watching: bool | None = None
    reason: str | None = None
    idle_s: float | None = None
    limit_s: float | None = None
    hang: str | None = None
    """What hangs; None where nothing does."""


@dataclass(frozen=True)
class ChainStatus(Section):
    """The chain as last polled; the file has the further fields of `health.chain.ChainLook`."""

    block: int | None = None
    reason: str | None = None
    registered: bool | None = None
    incentive: float | None = None
    chain_rank: float | None = None
    outer_step: int | None = None


@dataclass(frozen=True)
class CostsStatus(Section):
    """What monitoring costs; written by the monitor `costs`."""

    share_pct: float | None = None
    budget_pct: float | None = None
    budget_status: str | None = None
    """`ok`, `warning`, `critical` or `unknown`."""

    training_s: float | None = None
    total_s: float | None = None
    guard_blocking_s: float | None = None
    guard_blocking_pct: float | None = None
    guard_cpu_s: float | None = None
    operations: Mapping[str, Any] = field(default_factory=dict)
    """Rows of `costs.tracker`'s report, the most expensive first."""


@dataclass(frozen=True)
class FallbackStatus(Section):
    """Whether one rank computes on the CPU."""

    verdict: str | None = None
    evidence: Sequence[Any] = ()


@dataclass(frozen=True)
class RanksStatus(Section):
    """Comparison of the ranks; written by the monitor `ranks`."""

    cpu_fallback: Mapping[str, FallbackStatus] = field(default_factory=dict)
    straggler: Mapping[str, Any] | None = None
    slow_because: Any = None


@dataclass(frozen=True)
class JobStatus(Section):
    """Runs of one repeated job."""

    runs: int | None = None
    last_s: float | None = None
    max_s: float | None = None
    missed: int | None = None


@dataclass(frozen=True)
class MetricsStatus(Section):
    """The HTTP port; written by the monitor `metrics`."""

    events: Mapping[str, int] = field(default_factory=dict)
    """Events of this run by name."""

    since: str | None = None
    """When the guard started; UTC, ISO 8601."""

    url: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class RunStatus(Section):
    """The supervisor's fields, which are not in a section."""

    state: str | None = None
    """A value of `supervisor.states.State`."""

    paused: bool | None = None
    run_id: str | None = None
    pid: int | None = None
    """The guard's; `miner_pid` is the launcher's."""

    miner_pid: int | None = None
    command: Sequence[str] = ()
    attempt: int | None = None
    """Launches of this run after the first."""

    restarts: int | None = None
    """Failures since the miner was last healthy."""

    started: str | None = None
    """UTC, ISO 8601; None without a running launch."""

    last_exit: LastExit | None = None
    rank_processes: Mapping[str, RankProcess] = field(default_factory=dict)
    output_dropped_bytes: int | None = None


@dataclass(frozen=True)
class StatusDocument(RunStatus):
    """status.json: the run's fields, then one section per monitor.

    Sections that no program of this package reads (alerts, curves, gpu, incidents, nodes, …) are
    not modelled: the monitor's `snapshot` defines them.
    """

    updated: str | None = None
    """UTC, ISO 8601: when the guard last wrote the document."""

    verdict: VerdictStatus | None = None
    steps: StepsStatus = field(default_factory=StepsStatus)
    uploads: UploadsStatus = field(default_factory=UploadsStatus)
    health: HealthStatus = field(default_factory=HealthStatus)
    hang: HangStatus = field(default_factory=HangStatus)
    chain: ChainStatus = field(default_factory=ChainStatus)
    costs: CostsStatus = field(default_factory=CostsStatus)
    ranks: RanksStatus = field(default_factory=RanksStatus)
    metrics: MetricsStatus = field(default_factory=MetricsStatus)
    jobs: Mapping[str, JobStatus] = field(default_factory=dict)


def read_status(state: StateDir) -> StatusDocument | None:
    """The document of a state directory; None where no guard has written one, or a torn one."""
    document = read_json(state.status)
    return StatusDocument.from_json(document) if isinstance(document, dict) else None
