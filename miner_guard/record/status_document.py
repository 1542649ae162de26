"""The model of the guard's present state in run.db, with which every reader parses it.

Another version may have written it: a missing value becomes None or an empty section.
Fields have the same names as in JSON; units are in the names.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import socket
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from miner_guard.record.store import RunReader
from miner_guard.state_dir import STATE_DIR, StateDir, distrust
from miner_guard.system import processes
from miner_guard.system.descriptors import address

_Section = TypeVar("_Section", bound="Section")


class Section:
    """A section of the document. Subclasses are dataclasses whose fields all have defaults."""

    @classmethod
    def from_json(cls: type[_Section], document: Any) -> _Section:
        """Read the section. A missing or null value, or a section that is not a table, gets the
        default; fields that this version does not know are left out."""
        if not isinstance(document, Mapping):
            return cls()
        parts = _parts(typing.cast(Any, cls))
        values = {name: v for name in parts if (v := document.get(name)) is not None}
        for name, value in list(values.items()):
            part, is_table = parts[name]
            if part is None:
                continue
            if not isinstance(value, Mapping):
                del values[name]
            elif is_table:
                values[name] = {key: part.from_json(row) for key, row in value.items()}
            else:
                values[name] = part.from_json(value)
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """The section as it is written to the document."""
        return asdict(typing.cast(Any, self))


@functools.cache
def _parts(cls: Any) -> Mapping[str, tuple[type[Section] | None, bool]]:
    """For each field, the section that it holds, and whether it holds a table of them."""
    parts: dict[str, tuple[type[Section] | None, bool]] = {}
    for name, hint in typing.get_type_hints(cls).items():
        inside = [each for each in (hint, *typing.get_args(hint)) if isinstance(each, type)]
        part = next((each for each in inside if issubclass(each, Section)), None)
        parts[name] = part, typing.get_origin(hint) is Mapping
    return parts


@dataclass(frozen=True)
class LastExit(Section):
    """How the previous launch ended."""

    code: int | None = None
    """The exit code as reported by a shell: 128 + n if signal n ended the launcher."""

    signal: int | None = None
    asked: bool | None = None
    finished: bool | None = None
    runtime_s: float | None = None


@dataclass(frozen=True)
class RankProcess(Section):
    """One rank's process."""

    pid: int | None = None
    local_rank: int | None = None


@dataclass(frozen=True)
class RunStatus(Section):
    """The supervisor's fields, which are at the top level of the document."""

    name: str | None = None
    """The miner's (`run --name`), else the state directory's."""

    state: str | None = None
    """A value of `guard.states.State`."""

    paused: bool | None = None
    run_id: str | None = None
    keeper_pid: int | None = None
    """The process that owns the miner and that a service manager started; stop this one."""

    guard_pid: int | None = None
    pid: int | None = None
    command: Sequence[str] = ()
    host: str | None = None
    state_dir: str | None = None
    start_command: str | None = None
    """A command that starts this guard again: a pm2 or systemctl command if one of them runs the
    guard, otherwise the guard's command line."""

    settings_file: str | None = None
    """The guard.toml that the guard has read, or would read."""

    attempt: int | None = None
    """Number of launches in this run after the first."""

    restarts: int | None = None
    """Restarts in this run: launches after the first, and ranks that their launcher replaced."""

    started: str | None = None
    """When the launch began, UTC in ISO 8601; None if no launch is running."""

    last_exit: LastExit | None = None
    exit_code: int | None = None
    """The guard's exit code, once the run is over."""

    reason: str | None = None
    rank_processes: Mapping[str, RankProcess] = field(default_factory=dict)


@dataclass(frozen=True)
class RunState(Section):
    """What the run is doing, judged in `watch/state.py` and rendered in `watch/state_words.py`."""

    life: str | None = None
    """One of `watch.state_words.LIVES`."""

    stage: str | None = None
    """What a run that is starting or restarting is waiting for."""

    health: str | None = None
    """`well`, `degraded` or `failing`."""

    earning: str | None = None
    """`yes`, `at risk`, `no` or `not proven`; None if the miner publishes nothing."""

    earning_why: str | None = None
    """What shows it; empty if the cause says it."""

    colour: str | None = None
    """`green`, `yellow`, `red` or `grey` (nothing to judge: starting, or ended as asked)."""

    since: str | None = None
    cause: str | None = None
    """One sentence without a full stop: what the run does or what is wrong, with the value seen."""

    next_step: str | None = None
    """What to do next. Commands to type are in backticks."""

    event: str | None = None
    """The event whose row in the runbook applies."""

    key: str | None = None
    """Stable name of the condition; the numbers in the sentence change, the key does not."""

    changes: Sequence[Sequence[Any]] = ()
    """When which colour began, in seconds since 1970, over a week (`watch.state_words.Changes`)."""


@dataclass(frozen=True)
class RankSteps(Section):
    """One rank's latest step."""

    outer_step: int | None = None
    inner_step: int | None = None
    loss: float | str | None = None
    """A non-finite loss is written as `NaN`, `Infinity` or `-Infinity`."""

    step_time_s: float | None = None
    work_s: float | None = None
    """Duration of the step in seconds, minus the time spent waiting for other ranks. The step time
    alone does not distinguish the ranks, because collectives make it equal on all of them."""

    gpu_mem_gb: float | None = None
    gpu_peak_gb: float | None = None
    last_step_age_s: float | None = None


@dataclass(frozen=True)
class StepsStatus(Section):
    """The lead rank's training, written by the `steps` monitor."""

    outer_step: int | None = None
    inner_step: int | None = None
    total_steps: int | None = None
    steps: int | None = None
    """Inner steps that this guard has seen."""

    loss: float | str | None = None
    """A non-finite loss is written as `NaN`, `Infinity` or `-Infinity`."""

    loss_first: float | str | None = None
    lr: float | None = None
    grad_norm: float | str | None = None
    gpu_mem_gb: float | None = None
    step_time_s: float | None = None
    last_step_age_s: float | None = None
    phase: str | None = None
    """The phase that the lead rank is in now."""

    p50_s: float | None = None
    p95_s: float | None = None
    max_s: float | None = None
    grade: str | None = None
    """Grade of the median step time (`watch.step_times.grade`)."""

    tokens_per_s: float | None = None
    eta_upload_s: float | None = None
    eta_outer_s: float | None = None
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Shares of wall time by category, 0-1; the share of `training` is the goodput."""

    goodput_s: float | None = None
    """The wall time that was shared out, since the first launch."""

    per_rank: Mapping[str, RankSteps] = field(default_factory=dict)


NO_REPO = "no repo is configured; set [repo] kind"
NO_JUDGE = "this network's validators judge nothing that is published"
"""`RepoStatus.reason` if no repo is configured: one is missing, or none is needed."""


@dataclass(frozen=True)
class RepoStatus(Section):
    """The contents of the miner's repo."""

    age_s: float | None = None
    reason: str | None = None
    empty: bool | None = None
    revision: str | None = None
    outer_step: int | None = None
    inner_step: int | None = None
    due: bool | None = None
    stale: bool | None = None
    limit_s: float | None = None


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
    """The latest upload in the ledger."""

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
class UploadsStatus(Section):
    """The repo and the latest rows of the ledger. Written by the `uploads` monitor."""

    repo: RepoStatus = field(default_factory=RepoStatus)
    min_inner_step: int | None = None
    """The first inner step whose upload the gate allows; None until a step has been timed."""

    network: str | None = None
    """Why the profile's network pays nobody; None if it is alive."""

    pending: int | None = None
    """Number of pushes that have been reported but not verified yet."""

    decision: LastDecision | None = None
    upload: LastUpload | None = None
    audit: LastAudit | None = None
    incident: LastIncident | None = None


@dataclass(frozen=True)
class GpusStatus(Section):
    """NVML's latest sample; `checks.nvml` describes the rows."""

    state: str | None = None
    reason: str | None = None
    taken: float | None = None
    gpus: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class HealthStatus(Section):
    """The samplers' readings, written by the `health` monitor."""

    host: Mapping[str, Any] = field(default_factory=dict)
    gpus: GpusStatus = field(default_factory=GpusStatus)
    guard: Mapping[str, Any] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    """For each sampler, the reason why its readings are unknown."""

    def without_gpu(self) -> str:
        """Explain why no GPU is listed: the machine has none, or the guard cannot tell."""
        gpus = self.gpus
        if gpus.state == "absent":
            return f"no GPU: this machine has no NVIDIA driver ({gpus.reason})"
        if gpus.state == "ok":
            return "no GPU: the NVIDIA driver lists none"
        return f"unknown: {self.unknown.get('gpus') or gpus.reason or 'not read yet'}"


@dataclass(frozen=True)
class HangStatus(Section):
    """The state of the hang detector, written by the `hang` monitor."""

    watching: bool | None = None
    limit_s: float | None = None
    hang: str | None = None
    """Description of the current hang; None without a hang."""


@dataclass(frozen=True)
class ChainStatus(Section):
    """The chain at the last poll. The file also has the other fields of
    `uploads.chain.ChainReading`."""

    netuid: int | None = None
    hotkey: str | None = None
    block: int | None = None
    reason: str | None = None
    uid: int | None = None
    registered: bool | None = None
    incentive: float | None = None
    outer_step: int | None = None
    unpaid: str | None = None
    """What shows that the network pays no miner at the moment; None if nothing does."""


@dataclass(frozen=True)
class ClientStatus(Section):
    """What the lines of a miner without a hook say of its state, written by the `log_only`
    monitor."""

    phase: str | None = None
    """Empty during training."""

    phase_s: float | None = None
    position: int | None = None
    """The last place in a queue."""

    returns: int | None = None
    """How often the queue has moved the client back."""


@dataclass(frozen=True)
class CostsStatus(Section):
    """The cost of monitoring, written by the `costs` monitor."""

    share_pct: float | None = None
    budget_pct: float | None = None
    budget_status: str | None = None
    """`ok`, `warning`, `critical` or `unknown`."""

    guard_blocking_pct: float | None = None
    guard_cpu_s: float | None = None


@dataclass(frozen=True)
class FallbackStatus(Section):
    """The verdict on whether one rank computes on the CPU."""

    verdict: str | None = None
    evidence: Sequence[Any] = ()


@dataclass(frozen=True)
class RanksStatus(Section):
    """The comparison of the ranks, written by the `ranks` monitor."""

    cpu_fallback: Mapping[str, FallbackStatus] = field(default_factory=dict)


@dataclass(frozen=True)
class DiagnosisStatus(Section):
    """The ranks' reports about their model and GPU, written by the `diagnosis` monitor."""

    ranks: Sequence[Mapping[str, Any]] = ()
    """For each rank, the facts from `rank.diagnose`."""


@dataclass(frozen=True)
class Histogram(Section):
    """How long something took, as Prometheus counts it."""

    buckets: Mapping[str, int] = field(default_factory=dict)
    """For each upper bound in seconds, up to `+Inf`, how many took at most that long."""

    sum: float = 0.0


@dataclass(frozen=True)
class MetricsStatus(Section):
    """The HTTP endpoint's status, written by the `metrics` monitor."""

    events: Mapping[str, int] = field(default_factory=dict)
    """Number of events in this run, by event name."""

    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    """By name; the names are in `show.metrics`."""

    since: str | None = None
    """When the guard started; UTC, ISO 8601."""

    url: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class StatusDocument(RunStatus):
    """The present state: the supervisor's fields, then one section per monitor.

    The model leaves out sections that no code in this package reads (alerts, curves, gpu,
    incidents, jobs, nodes, …); the `snapshot` methods of their monitors define them.
    """

    updated: str | None = None
    """UTC, ISO 8601: when the guard last wrote the document."""

    verdict: RunState | None = None
    steps: StepsStatus = field(default_factory=StepsStatus)
    uploads: UploadsStatus = field(default_factory=UploadsStatus)
    health: HealthStatus = field(default_factory=HealthStatus)
    hang: HangStatus = field(default_factory=HangStatus)
    chain: ChainStatus = field(default_factory=ChainStatus)
    log_only: ClientStatus = field(default_factory=ClientStatus)
    costs: CostsStatus = field(default_factory=CostsStatus)
    ranks: RanksStatus = field(default_factory=RanksStatus)
    diagnosis: DiagnosisStatus = field(default_factory=DiagnosisStatus)
    metrics: MetricsStatus = field(default_factory=MetricsStatus)
    age_s: float = 0.0
    """Seconds from `updated` to the reading of it; a reader's, never written, like the next two."""

    gone: bool = False
    """Whether the guard that wrote it no longer runs, though it did not say that it ended."""

    miner_runs: bool | None = None
    """Whether the miner of a guard that is gone still runs; None if unknown."""


SILENT_S = 60.0
"""If the document is older than this, the guard is gone or stuck, because it writes every few
seconds."""

OLD_S = 8.0
"""Even an idle guard writes this often; if it did not, and nothing answers on its control socket,
it is gone."""


def read_document(state: StateDir) -> dict[str, Any]:
    """A state directory's present state as JSON, with every age in it as of now, and with what
    `StatusDocument` has for readers; empty if no guard has written one."""
    document, age_s = RunReader(state.db).now_and_age()
    if not document:
        return {}
    # A guard that its keeper replaces does not answer for a moment, and the keeper holds the lock.
    silent = not listens(state) and (age_s > OLD_S or not _is_locked(state))
    gone = document.get("state") != "done" and (silent or age_s > SILENT_S)
    steps, repo = document.get("steps"), (document.get("uploads") or {}).get("repo")
    _grow(steps, "last_step_age_s", age_s)
    for row in steps.get("per_rank", {}).values() if isinstance(steps, dict) else ():
        _grow(row, "last_step_age_s", age_s)
    _grow(repo, "age_s", age_s)
    if isinstance(repo, dict) and repo.get("age_s") is not None and repo.get("limit_s") is not None:
        repo["stale"] = bool(repo.get("stale")) or repo["age_s"] > repo["limit_s"]
    runs = _miner_runs(document, state) if gone else None
    return {**document, "age_s": age_s, "gone": gone, "miner_runs": runs}


def _miner_runs(document: Mapping[str, Any], state: StateDir) -> bool | None:
    """Whether the launched process still runs. A pid may be another process's by now, or another
    machine's; the environment shows which guard launched it."""
    pid = document.get("pid")
    if not isinstance(pid, int) or document.get("host") != socket.gethostname():
        return None
    seen = processes.stat(pid)
    if seen is None or not seen.lives:
        return None if seen is None and processes.exists(pid) else False
    place = processes.environment(pid).get(STATE_DIR)
    return None if place is None else os.path.realpath(place) == os.path.realpath(state.root)


def _grow(table: Any, name: str, more_s: float) -> None:
    if isinstance(table, dict) and isinstance(table.get(name), (int, float)):
        table[name] += more_s


def read_status(state: StateDir) -> StatusDocument | None:
    """`read_document`, parsed; None if no guard has written a state."""
    document = read_document(state)
    return StatusDocument.from_json(document) if document else None


def listens(state: StateDir) -> bool:
    """Whether a guard runs in this state directory: one answers on its control socket."""
    try:
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client,
            address(state.control) as name,
        ):
            client.settimeout(1.0)
            client.connect(name)
    except OSError:
        return False
    return True


def _is_locked(state: StateDir) -> bool:
    """Whether a keeper or a guard holds the lock of this state directory."""
    try:
        fd = os.open(state.lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def running_guards() -> list[StateDir]:
    """Find this user's running guards by the lock files that their processes hold open."""
    import psutil

    roots = set()
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or ())
        if process.pid == os.getpid() or not ("miner-guard" in words or "miner_guard" in words):
            continue
        # Fails for another user's process, or one that has just ended.
        with contextlib.suppress(psutil.Error, OSError):
            files = [Path(file.path) for file in process.open_files()]
            roots |= {path.parent for path in files if path == StateDir(path.parent).lock}
    states = [StateDir(root) for root in sorted(roots) if distrust(root) is None]
    return [state for state in states if listens(state)]
