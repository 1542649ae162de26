"""Every setting of the guard, as plain dataclasses: one class per section of guard.toml.

Standard library only, so that the hook inside a rank can read its settings without importing
anything that the miner does not have. `miner_guard.config.loading` reads files and the environment,
checks the values, and remembers where each came from.

Units are in the names: `_s` seconds, `_gb` GiB, `_pct` per cent, `_ratio` a share between 0 and 1.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union


@dataclass(frozen=True)
class Range:
    """The bounds of a number. None means no bound on that side; infinity and NaN are never
    allowed."""

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


@dataclass(frozen=True)
class _Text:
    """How a list or a table is read from the text of a variable."""

    read: Callable[[str], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(
            lambda value: self.read(value) if isinstance(value, str) else value, handler(source)
        )


def _items(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in _items(text)]
    if not all(sign for _, sign, _ in pairs):
        raise ValueError("write NAME=NUMBER,NAME=NUMBER")
    return {name.strip(): number.strip() for name, _, number in pairs}


Positive = Annotated[float, Range(gt=0)]
NotNegative = Annotated[float, Range(ge=0)]
Percent = Annotated[float, Range(ge=0, le=100)]
Count = Annotated[int, Range(ge=0)]
AtLeastOne = Annotated[int, Range(ge=1)]
Words = Annotated[tuple[str, ...], _Text(_items)]
Numbers = Annotated[dict[str, float], _Text(_numbers)]


@dataclass(frozen=True)
class MinerSettings:
    """The miner, and the training settings that the guard needs to know."""

    profile: str | None = None
    """A profile of `validators/profiles/` (`sn38`, `iota`, `psyche`) or a path; None: without."""

    attach: Literal["sn38", "auto", "log"] | None = None
    """How to hook an unmodified miner: `sn38`, `auto` (any script), `log` (only read its output).
    None: the miner calls the hook itself."""

    log_patterns: Words = ()
    """`attach = "log"`: regular expressions for your own step lines, with the groups from
    watch/patterns.toml."""

    finite: bool | None = None
    """True: exit code 0 means that the miner has finished its work, even without
    `guard.close(finished=True)`. False: only that call means it. None: like False, except that with
    `attach = "auto"` a loop that ran to completion on every rank without an error also counts."""

    stop_signal: Literal["SIGTERM", "SIGINT"] = "SIGTERM"
    """What asks the launcher to stop. SIGINT: for a program that cleans up only after Ctrl+C."""

    stop_timeout_s: Positive = 45.0
    """Time between this signal and SIGKILL. Keep it longer than torchrun's own 30 s."""

    batch_size: AtLeastOne | None = None
    """Samples per micro-batch per rank, in case the hook does not report it."""

    effective_batch_size: AtLeastOne | None = None
    """Samples per inner step across all ranks, in case the hook does not report it."""

    upload_steps: AtLeastOne | None = None
    """Inner steps between uploads, for forecasts."""


@dataclass(frozen=True)
class StepSettings:
    """Inner-step timing."""

    good_s: Positive = 20.0
    """A step that takes up to this long is good (source 004: 10-20 s)."""

    acceptable_s: Positive = 40.0
    """A step that takes up to this long is acceptable (source 004: 20-40 s)."""

    slow_s: Positive = 60.0
    """Absolute rule: a step that takes longer than this is slow (source 004)."""

    breakdown_every: AtLeastOne = 200
    """Inner steps between `TIMING BREAKDOWN` blocks (source 001)."""


@dataclass(frozen=True)
class GpuSettings:
    """GPUs: how many to expect, when to check them, and what counts as good utilization."""

    expect: Union[Literal["auto"], Count] = "auto"
    """Number of GPUs required. `auto`: as many as in the last run, otherwise as many as the profile
    requires, otherwise as many as are present."""

    preflight: Union[bool, Literal["warn"]] = True
    """Run the preflight before the miner starts. `warn` starts the miner even if a check is
    critical."""

    preflight_wait_s: NotNegative = 300.0
    """How long to wait for missing GPUs, because a driver may come up late after boot."""

    low_memory_gb: NotNegative = 1.0
    """If less memory than this is allocated on a GPU during training, the model may be on the CPU
    (source 004)."""

    first_check_s: Positive = 60.0
    """Time from the launch to the first check of the memory share (source 002)."""

    check_every_s: Positive = 150.0
    """Interval between later checks (source 002: 120-180 s)."""

    severe_pct: Percent = 50.0
    """A memory share below this counts as severe under-utilization (source 002)."""

    optimal_pct: Percent = 70.0
    """The optimal range is from here to `near_limit_pct` (source 002)."""

    near_limit_pct: Percent = 90.0
    """A memory share above this is near the limit (source 002)."""

    good_memory_gb: Positive = 15.0
    """If a GPU that is computing uses at least this much memory, the guard does not warn about a
    low share (source 004: 15-35 GB is good, whatever the GPU's size)."""

    high_memory_gb: Positive = 35.0
    """Memory use above this exceeds source 004's good range (15-35 GB) for an 80 GB GPU."""

    model_name: str | None = None
    """The model's architecture, in case the hook does not report it. Source 002's list classifies
    the architecture as small or large."""

    on_underuse: Literal["warn", "relaunch"] = "warn"
    """`relaunch` restarts the miner with a larger batch, at most three times, and never again
    after an out-of-memory error."""

    batch_argument: str | None = None
    """The argument that `relaunch` rewrites, such as `--neuron.local_batch_size_train`."""

    memory_settle_s: NotNegative = 50.0
    """How long to wait after a stop for GPU memory to fall back to its pre-launch level."""


@dataclass(frozen=True)
class LossSettings:
    """Loss and memory curves."""

    plateau_steps: AtLeastOne = 1000
    """Number of steps without a decrease before the guard reports a plateau."""


@dataclass(frozen=True)
class GateSettings:
    """The limits that the gate's rules enforce. A profile may change the defaults."""

    mode: Literal["enforce", "shadow"] = "enforce"
    """`enforce` blocks uploads; `shadow` only reports what it would block."""

    min_inner_step: Count = 50
    """The gate blocks uploads at inner steps below this (source 004; subnet 38's validators reject
    only 0)."""

    min_upload_interval_s: NotNegative = 0.0
    """The gate blocks an upload while the published one is younger than this. 0: never."""

    repo_age_target_s: Positive = 1800.0
    """An upload is due when the repo is this old (source 004: keep < 1800 s)."""

    repo_age_limit_s: Positive = 2000.0
    """The repo is stale when it is this old (source 004: < 2000 s)."""

    broadcast_timeout_s: Positive = 60.0
    """How long each rank waits for rank 0's decision before it blocks the upload itself."""


@dataclass(frozen=True)
class RepoSettings:
    """The published repo that the guard watches."""

    kind: Literal["none", "local", "s3", "hf"] = "none"
    """Where the miner publishes."""

    path: str | None = None
    """`local`: the folder."""

    bucket: str | None = None
    """`s3`: the bucket."""

    endpoint: str | None = None
    """`s3`, `hf`: the endpoint's URL."""

    repo_id: str | None = None
    """`hf`: owner/name."""

    credentials: Literal["env", "dotenv", "file"] = "env"
    """Where the guard reads the keys from; never the command line."""

    credentials_file: str | None = None
    """`dotenv`: the miner's `.env` file; `file`: a TOML file with the keys."""

    refresh_every_s: Positive = 60.0
    """Interval between repo checks. The chain is read half as often."""

    audit_every_s: NotNegative | None = None
    """Seconds between audits; the guard also audits after each verified push. 0: only on
    demand. None: 600 if the profile defines what validators accept, otherwise 0."""


@dataclass(frozen=True)
class ChainSettings:
    """The chain; the guard reads public data only."""

    network: str | None = None
    """Name or ws:// URL for bittensor. None: the guard does not read the chain."""

    netuid: Count | None = None
    """The subnet."""

    hotkey: str | None = None
    """ss58 address of the miner's hotkey (public)."""

    master_uid: Count | None = None
    """uid whose repo publishes the network's outer step."""

    blocks_per_allreduce: AtLeastOne | None = None
    """Number of blocks between AllReduces that the gate and the audit assume. None: the profile's
    value (subnet 38: 400; its master uses 750 after its first successful AllReduce)."""


@dataclass(frozen=True)
class AlertSettings:
    """Who gets notified, and about what."""

    urls: Words = ()
    """Apprise URLs. Set them through MINER_GUARD_ALERTS__URLS, because they contain secrets."""

    preset: Literal["overnight"] | None = None
    """`overnight`: alert on stalls, an exploding loss, missing checkpoints and all other problems
    (source 003)."""

    min_level: Literal["info", "warning", "error", "critical"] = "error"
    """Lowest event level that the guard sends."""

    events: Words = ()
    """Names of additional events to send, whatever their level."""

    cooldown_s: NotNegative = 900.0
    """Shortest time before the guard repeats an alert."""

    heartbeat_url: str | None = None
    """URL that the guard pings while the miner is making progress."""


@dataclass(frozen=True)
class HttpSettings:
    """The HTTP port."""

    port: Annotated[int, Range(ge=0, le=65535)] | None = None
    """The port to listen on. None: do not listen. 0: any free port."""

    host: str = "127.0.0.1"
    """Address to listen on. Any address other than loopback requires a token."""

    token: str | None = None
    """Bearer token. Set it through MINER_GUARD_HTTP__TOKEN, because it is a secret. On any address
    other than loopback, it must have at least 16 characters."""


@dataclass(frozen=True)
class OtelSettings:
    """OpenTelemetry. Headers, certificates, timeout and compression come from the SDK's own
    variables (`OTEL_EXPORTER_OTLP_HEADERS` and so on)."""

    endpoint: str | None = None
    """Base URL of an OTLP/HTTP receiver, such as http://127.0.0.1:4318; `/v1/logs` and
    `/v1/metrics` are appended. None: the guard exports nothing."""


@dataclass(frozen=True)
class LogSettings:
    """Console lines and guard.jsonl."""

    emoji: bool = True
    """Print the source documents' emoji before each line's text."""

    level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    """Lowest level printed on the console; guard.jsonl contains every level."""

    max_bytes: AtLeastOne = 50_000_000
    """Size at which guard.jsonl is rotated."""

    keep: Count = 10
    """How many rotated files to keep."""

    step_lines_per_s: Positive = 5.0
    """Limit on step lines per second on the console and in guard.jsonl. The guard logs how many it
    left out."""


_ALLOWANCES_S = {
    "allreduce": 840.0,
    **dict.fromkeys(("upload", "load_state", "pause", "checkpoint"), 1800.0),
    **dict.fromkeys(("inference", "val_loss", "example_loss", "monitor"), 1800.0),
}


@dataclass(frozen=True)
class HangSettings:
    """Time limits after which the guard treats missing progress as a hang."""

    min_s: Positive = 300.0
    """Shortest time without a step that counts as a hang."""

    first_step_s: Positive = 1800.0
    """Time allowed for the miner to download, load and compile before its first step."""

    exit_s: Positive = 330.0
    """How long the miner's process may keep running after all ranks have finished training.

    Keep it longer than torchrun's exit barrier: a node that has finished waits that long for the
    other nodes, even for a lost one."""

    phases: Numbers = field(default_factory=dict)
    """Time allowed for a phase, by its name, in seconds. By default, `allreduce` has 840 s (subnet
    38); `upload`, `load_state`, `pause`, `checkpoint`, `inference`, `val_loss`, `example_loss` and
    `monitor` have 1800 s. `epoch` is the time for a whole epoch of a miner that is known by its
    lines."""

    action: Literal["restart", "stop", "warn"] = "restart"
    """What the guard does about a hang after it has stored the evidence."""

    @property
    def allowances(self) -> dict[str, float]:
        """Time limits, in seconds, of the phases that have their own."""
        return {**_ALLOWANCES_S, **self.phases}


@dataclass(frozen=True)
class RestartSettings:
    """Restarts after a failure."""

    enabled: bool = True
    """Restart the miner after a failure. False (`--no-restart`): `run` exits with the miner's exit
    code."""

    max_restarts: Count = 5
    """After this many restarts without a healthy stretch in between, the next failure counts as a
    crash loop (exit code 75)."""

    backoff_s: NotNegative = 2.0
    """Wait before the first restart. The wait doubles with each restart after that."""

    waits_in: tuple[str, ...] = ()
    """`ctl restart` waits while a miner that is known by its lines is in one of these states (or in
    `training`), since leaving would cost it the epoch. Asked again, it restarts at once."""


@dataclass(frozen=True)
class HealthSettings:
    """Host and GPU samplers, HEALTH lines, other nodes and checkpoints."""

    snapshot_every_s: Positive = 60.0
    """Interval between HEALTH lines, and between pings of `alerts.heartbeat_url`. The samplers read
    as often, and at least every 10 s."""

    disk_min_free_gb: NotNegative = 5.0
    """The guard warns if there is less free disk space than this."""

    checkpoint_dir: str | None = None
    """Folder in which the guard watches the age and size of checkpoints. None: the guard knows only
    about checkpoints that the hook reports."""

    checkpoint_max_age_s: Positive = 3600.0
    """The guard reports `CHECKPOINT STALE` if the newest checkpoint is older than this."""


@dataclass(frozen=True)
class CostSettings:
    """Limits on what monitoring may cost (source 000)."""

    budget_pct: Percent = 5.0
    """Share of training time that monitoring may take."""

    critical_pct: Percent = 10.0
    """Share of training time above which the event is critical rather than a warning."""

    operation_warn_s: Positive = 30.0
    """The guard warns if a single operation takes longer than this."""


@dataclass(frozen=True)
class Config:
    """All settings. The fields are named after the sections of guard.toml."""

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
    otel: OtelSettings = field(default_factory=OtelSettings)
    logs: LogSettings = field(default_factory=LogSettings)


def sections() -> dict[str, type]:
    """Each section's dataclass by name, in `Config`'s order."""
    hints = typing.get_type_hints(Config)
    return {f.name: hints[f.name] for f in fields(Config)}


class BadConfig(Exception):
    """The configuration can't be used; the message is human-readable. `run` exits with 78."""


class BadFlag(BadConfig):
    """A flag has an invalid value. The exit code is 64, because the error is on the command line,
    not in the configuration."""


def read_toml(path: Path) -> dict[str, Any]:
    """Read the document at `path`. Raises BadConfig if it can't be read or parsed."""
    # Late: the hook reads no TOML, and a miner's Python 3.10 may lack tomli.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadConfig(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise BadConfig(f"{path}: not valid TOML: {error}") from error
    except RecursionError as error:
        raise BadConfig(f"{path}: not valid TOML: values are nested too deeply") from error
