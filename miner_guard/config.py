"""Every setting of the guard, as plain dataclasses: one class per section of guard.toml.

Standard library only, so that the hook inside a rank can read its share of the settings without
importing anything that the miner does not already have. Reading files and the environment, checking
and remembering where each value came from is the work of `miner_guard.settings`.

Units are in the names: `_s` seconds, `_gb` GiB, `_pct` per cent, `_ratio` a share of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union


@dataclass(frozen=True)
class Range:
    """Allowed values of a number; `None` leaves that side open, but infinity is no number."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        schema = handler(source)
        bounds = {"ge": self.ge, "gt": self.gt, "le": self.le}
        schema.update({name: limit for name, limit in bounds.items() if limit is not None})
        if schema["type"] == "float":
            schema["allow_inf_nan"] = False
        return schema


Positive = Annotated[float, Range(gt=0)]
NotNegative = Annotated[float, Range(ge=0)]
Percent = Annotated[float, Range(ge=0, le=100)]
Share = Annotated[float, Range(ge=0, le=1)]
Count = Annotated[int, Range(ge=0)]
AtLeastOne = Annotated[int, Range(ge=1)]


@dataclass(frozen=True)
class MinerSettings:
    """The miner that is run, and what is known of its training settings."""

    profile: str | None = None
    """Name of a profile under `validators/profiles/` (`sn38`, `sn3`), or a path to one. None: no profile."""

    attach: Literal["sn38", "auto", "log"] | None = None
    """Hook an unmodified miner: `sn38`, `auto` (any script), `log` (read its lines only). None: it calls the hook."""

    log_patterns: tuple[str, ...] = ()
    """`attach = "log"`: regular expressions of your own step lines, with the groups of attach/patterns.toml."""

    finite: bool = False
    """True: an exit code of 0 means that the work is finished, also without `guard.close(finished=True)`."""

    stop_timeout_s: Positive = 45.0
    """How long the miner may take to stop after SIGTERM before SIGKILL. Above torchrun's own 30 s."""

    batch_size: AtLeastOne | None = None
    """Samples per micro-batch and rank; used where the hook does not report it."""

    effective_batch_size: AtLeastOne | None = None
    """Samples per inner step over all ranks; used where the hook does not report it."""

    upload_steps: AtLeastOne | None = None
    """Inner steps between two uploads, for forecasts."""

    inner_steps_per_outer: AtLeastOne | None = None
    """Inner steps between two outer steps, for the ETA."""

    master_port: Annotated[int, Range(ge=1, le=65535)] | None = None
    """The rendezvous port that must be free before a start. None: read from the command, else not checked."""


@dataclass(frozen=True)
class GateSettings:
    """What may be uploaded. The rules' own numbers; a profile changes them."""

    mode: Literal["enforce", "shadow"] = "enforce"
    """`enforce` blocks; `shadow` says what it would do and blocks nothing."""

    min_inner_step: Count = 50
    """Inner steps below this are blocked (source 004; subnet 38's validators reject 0 only)."""

    min_upload_interval_s: NotNegative = 0.0
    """A repo younger than this blocks: too soon. 0 switches the rule off."""

    repo_age_target_s: Positive = 1800.0
    """Past this the upload is due (source 004: keep < 1800 s)."""

    repo_age_limit_s: Positive = 2000.0
    """Past this the repo is stale (source 004: < 2000 s)."""

    broadcast_timeout_s: Positive = 60.0
    """How long the ranks wait for rank 0's decision before they block locally."""

    inputs_max_age_s: Positive = 300.0
    """What gate-inputs.json says of repo and network counts as unknown when older than this."""


@dataclass(frozen=True)
class StepSettings:
    """Inner-step timing."""

    good_s: Positive = 20.0
    """Up to this a step is good (source 004: 10-20 s)."""

    acceptable_s: Positive = 40.0
    """Up to this a step is acceptable (source 004: 20-40 s)."""

    slow_s: Positive = 60.0
    """Absolute rule: a step beyond this is slow (source 004)."""

    expected: str = "10-30s"
    """What the slow-step line calls expected (source 004)."""

    window: AtLeastOne = 128
    """Recent steps of the same kind that median and MAD are taken of."""

    warmup: Count = 10
    """First steps of a run that are left out: compilation, caches."""

    mad_factor: Positive = 5.0
    """Relative rule: slow beyond median + max(mad_factor · 1.4826 · MAD, min_excess_ratio · median)."""

    min_excess_ratio: Positive = 0.5
    """The least excess over the median that is called slow."""

    min_excess_s: NotNegative = 1.0
    """The same in seconds: a busy host delays short steps by fractions of a second, and nobody need look."""

    regression_ratio: Share = 0.75
    """Best historical median / median of the last 32 below this: a lasting slowdown."""

    fast_log_every: AtLeastOne = 10
    """Inner steps between two `Fast log time` lines (source 001)."""

    breakdown_every: AtLeastOne = 200
    """Inner steps between two `TIMING BREAKDOWN` blocks (source 001)."""

    fast_log_max_s: Positive = 1.0
    """Red flag: a fast log that takes longer (source 001)."""

    overhead_max_pct: Percent = 20.0
    """Red flag: overhead of an evaluation step above this (source 001)."""

    inference_max_pct: Percent = 90.0
    """Red flag: inference share above this (source 001)."""

    val_loss_max_pct: Percent = 50.0
    """Red flag: validation share above this (source 001)."""

    red_flag_min_s: NotNegative = 1.0
    """Shares of an evaluation step shorter than this raise no red flag: its parts are within one fast log."""

    straggler_window: AtLeastOne = 20
    """Steps over which ranks are compared."""

    straggler_warn_ratio: Share = 0.10
    """(victims' median wait − culprit's wait) / step above this names a straggler."""

    straggler_critical_ratio: Share = 0.20
    """The same, critical."""

    straggler_min_s: NotNegative = 0.1
    """A smaller difference in waiting names nobody, whatever its share of a short step."""


@dataclass(frozen=True)
class GpuSettings:
    """GPUs: what is expected, and when to look."""

    expect: Union[Literal["auto"], Annotated[int, Range(ge=0)]] = "auto"
    """GPUs that must be there. `auto`: as many as at the last run, else as the profile demands, else as there are."""

    on_critical: Literal["stop", "warn"] = "stop"
    """What a critical preflight finding does to the start."""

    preflight: bool = True
    """Look before the miner is started."""

    preflight_wait_s: NotNegative = 300.0
    """How long to wait for GPUs that are missing: a driver may be late after boot."""

    probe_timeout_s: Positive = 20.0
    """Deadline of one probe; a driver that hangs is a finding, not a hang."""

    diagnose_timeout_s: Positive = 30.0
    """How long `guard.diagnose` waits for each rank."""

    low_memory_gb: NotNegative = 1.0
    """Less allocated than this on a GPU that trains: the model may be on the CPU (source 004)."""

    good_memory_gb: tuple[float, float] = (15.0, 35.0)
    """Memory of a healthy subnet 38 rank (source 004)."""

    first_check_s: Positive = 60.0
    """First memory-share check after launch (source 002)."""

    check_every_s: Positive = 150.0
    """Then every so often (source 002: 120-180 s)."""

    severe_pct: Percent = 50.0
    """Memory share below this is severe under-use (source 002)."""

    optimal_pct: Percent = 70.0
    """From here to `near_limit_pct` is the optimal range (source 002)."""

    near_limit_pct: Percent = 90.0
    """Above this it is near the limit (source 002)."""

    drop_pct: Percent = 20.0
    """A fall of the memory share by as many points between two checks is a sudden drop (source 002: 76 % to 45 %)."""

    model_name: str | None = None
    """Name of the architecture, where the hook does not report it: small or large by the document's list."""

    large_model_params: AtLeastOne = 100_000_000
    """Models of unknown name count as large from this many parameters."""

    on_underuse: Literal["warn", "relaunch"] = "warn"
    """`relaunch` restarts the miner with a larger batch, at most three times, never past an out-of-memory."""

    batch_argument: str | None = None
    """The argument that `relaunch` rewrites, such as `--neuron.local_batch_size_train`."""

    max_relaunches: Count = 3
    """How often `relaunch` may happen in one run."""

    memory_settle_s: NotNegative = 50.0
    """How long to wait, after a stop, for GPU memory to come back to its level from before the launch."""


@dataclass(frozen=True)
class LossSettings:
    """Loss and memory curves. Constants from research/telemetry.md."""

    window: AtLeastOne = 64
    """Values that a spike is judged against."""

    warmup: Count = 32
    """Values before the first verdict."""

    mad_factor: Positive = 6.0
    """Spike beyond median + max(mad_factor · 1.4826 · MAD, min_excess_ratio · |median|)."""

    min_excess_ratio: Positive = 0.10
    """The least relative excess that is called a spike."""

    explosion_ratio: Positive = 2.0
    """Five steps in a row beyond this multiple of the mean are an explosion."""

    divergence_points: AtLeastOne = 30
    """Points over which a rising trend is judged."""

    divergence_p: Share = 0.99
    """P(slope > 0) above this is divergence."""

    plateau_steps: AtLeastOne = 1000
    """Steps without a decrease before a plateau is remarked."""

    overfit_evals: AtLeastOne = 6
    """Evaluations that must rise while training falls."""

    leak_floor_gb: Positive = 1.0
    """Growth of allocated memory below this is never called a leak."""


@dataclass(frozen=True)
class HangSettings:
    """When no progress is a hang."""

    min_s: Positive = 300.0
    """No step for this long, at the least, before a hang is said."""

    factor: Positive = 5.0
    """Or this many times the longest recent step, if that is longer (NVRx's calculated timeout)."""

    first_step_s: Positive = 1800.0
    """Allowance until the first step: download, load, compile."""

    allreduce_s: Positive = 840.0
    """Allowance of the phase `allreduce` (subnet 38)."""

    upload_s: Positive = 1800.0
    """Allowance of the phase `upload`."""

    load_state_s: Positive = 1800.0
    """Allowance of the phase `load_state`."""

    pause_s: Positive = 1800.0
    """Allowance of the phase `pause`."""

    exit_s: Positive = 330.0
    """How long the miner's process may live on after all ranks have ended their training.

    Above torchrun's exit barrier: a node that is done waits so long for the others, also for one that is lost.
    """

    phases: dict[str, float] = field(default_factory=dict)
    """Allowances of other phases, by name, in seconds."""

    stack_timeout_s: Positive = 10.0
    """How long gathering the stacks may take."""

    action: Literal["restart", "stop", "warn"] = "restart"
    """What to do after the evidence is stored."""


@dataclass(frozen=True)
class RestartSettings:
    """Restarts after a failure."""

    enabled: bool = True
    """False: `--no-restart`, the exit code is the miner's own."""

    max_restarts: Count = 5
    """Restarts without a healthy stretch between them before it is a crash loop (exit 75)."""

    backoff_s: NotNegative = 2.0
    """Wait before the first restart; doubles each time."""

    backoff_max_s: Positive = 300.0
    """The longest wait."""

    jitter_ratio: Share = 0.1
    """Random share added to each wait."""

    healthy_s: Positive = 600.0
    """A run of this length, with steps, resets the count."""


@dataclass(frozen=True)
class HealthSettings:
    """Snapshots."""

    snapshot_every_s: Positive = 60.0
    """Seconds between two HEALTH lines."""

    sample_every_s: Positive = 10.0
    """Seconds between two samples."""

    sampler_timeout_s: Positive = 5.0
    """Deadline of one sampler."""

    disk_min_free_gb: NotNegative = 5.0
    """Less free space than this is warned of."""

    shm_min_gb: NotNegative = 1.0
    """A smaller /dev/shm is warned of: Docker's 64 MB breaks NCCL and dataloaders."""

    node_check_every_s: Positive = 5.0
    """Seconds between two looks at the other nodes of a run on several."""

    node_timeout_s: Positive = 3.0
    """How long another node may take to answer."""

    clock_skew_max_s: Positive = 60.0
    """A larger difference to the storage's Date header is warned of."""

    checkpoint_dir: str | None = None
    """Folder of checkpoints whose age and size are watched. None: reported by the hook."""

    checkpoint_max_age_s: Positive = 3600.0
    """An older newest checkpoint is `CHECKPOINT STALE`."""


@dataclass(frozen=True)
class CostSettings:
    """What monitoring may cost (source 000)."""

    preset: Literal["production", "research", "final_evaluation"] | None = None
    """One of source 000's presets; sets the budget below."""

    budget_pct: Percent = 5.0
    """Share of training time that monitoring may take."""

    critical_pct: Percent = 10.0
    """Above this it is critical."""

    operation_warn_s: Positive = 30.0
    """A single operation that takes longer is warned of."""

    throttle: bool = False
    """Allow `tracker.due(name)` to stretch intervals while over budget."""


@dataclass(frozen=True)
class RepoSettings:
    """The published repo that is watched."""

    kind: Literal["none", "local", "s3", "hf"] = "none"
    """Where the miner publishes."""

    path: str | None = None
    """`local`: the folder."""

    bucket: str | None = None
    """`s3`: the bucket."""

    endpoint: str | None = None
    """`s3`, `hf`: the endpoint's URL."""

    region: str = "auto"
    """`s3`: the region (`auto` for R2)."""

    repo_id: str | None = None
    """`hf`: owner/name."""

    credentials: Literal["env", "dotenv", "file"] = "env"
    """Where the keys are read from; never from a command line."""

    credentials_file: str | None = None
    """`dotenv`: the `.env` as the miner uses it; `file`: a TOML file with the keys."""

    refresh_every_s: Positive = 60.0
    """Seconds between two looks at the repo."""

    timeout_s: Positive = 20.0
    """Deadline of one look."""

    verify_uploads: bool = True
    """Look at the repo after each reported push."""

    audit_every_s: NotNegative = 0.0
    """Seconds between two audits; 0 runs none on a schedule."""


@dataclass(frozen=True)
class ChainSettings:
    """The chain; only public data is read."""

    network: str | None = None
    """Name or ws:// URL for bittensor. None: the chain is not read."""

    netuid: Annotated[int, Range(ge=0)] | None = None
    """The subnet."""

    hotkey: str | None = None
    """ss58 address of the miner's hotkey (public)."""

    master_uid: Annotated[int, Range(ge=0)] | None = None
    """uid whose repo says the network's outer step."""

    refresh_every_s: Positive = 120.0
    """Seconds between two looks."""

    timeout_s: Positive = 30.0
    """Deadline of one look."""


@dataclass(frozen=True)
class AlertSettings:
    """Who is told."""

    urls: tuple[str, ...] = ()
    """Apprise URLs; better given through MINER_GUARD_ALERTS__URLS, they hold secrets."""

    preset: Literal["overnight"] | None = None
    """`overnight`: stalls, loss explosion, nothing saved, any problem (source 003)."""

    min_level: Literal["info", "warning", "error", "critical"] = "error"
    """Events from this level on are sent."""

    events: tuple[str, ...] = ()
    """Further events, whatever their level."""

    cooldown_s: NotNegative = 900.0
    """The same alert is not repeated sooner."""

    heartbeat_url: str | None = None
    """Pinged while the miner progresses."""

    heartbeat_every_s: Positive = 300.0
    """Seconds between two pings."""


@dataclass(frozen=True)
class HttpSettings:
    """The HTTP port."""

    port: Annotated[int, Range(ge=0, le=65535)] | None = None
    """None: no port. 0: any free one."""

    host: str = "127.0.0.1"
    """Anything but loopback needs a token."""

    token: str | None = None
    """Bearer token; better given through MINER_GUARD_HTTP__TOKEN."""


@dataclass(frozen=True)
class LogSettings:
    """Console line and guard.jsonl."""

    emoji: bool = True
    """The documents' emoji before the words."""

    level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    """Console lines from this level on; guard.jsonl has them all."""

    max_bytes: AtLeastOne = 50_000_000
    """Size at which guard.jsonl is rotated."""

    keep: Count = 10
    """Rotated files kept."""

    keep_incidents: AtLeastOne = 50
    """Folders of evidence kept under incidents/, the newest; each holds up to about 1 MB per rank."""

    step_lines_per_s: Positive = 5.0
    """Step lines on the console and in guard.jsonl; the number left out is said."""

    classify: bool = True
    """Look for incidents in the relayed output."""


@dataclass(frozen=True)
class Config:
    """All sections. Field names are the sections of guard.toml."""

    miner: MinerSettings = field(default_factory=MinerSettings)
    gate: GateSettings = field(default_factory=GateSettings)
    steps: StepSettings = field(default_factory=StepSettings)
    gpu: GpuSettings = field(default_factory=GpuSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    hang: HangSettings = field(default_factory=HangSettings)
    restart: RestartSettings = field(default_factory=RestartSettings)
    health: HealthSettings = field(default_factory=HealthSettings)
    costs: CostSettings = field(default_factory=CostSettings)
    repo: RepoSettings = field(default_factory=RepoSettings)
    chain: ChainSettings = field(default_factory=ChainSettings)
    alerts: AlertSettings = field(default_factory=AlertSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    logs: LogSettings = field(default_factory=LogSettings)
