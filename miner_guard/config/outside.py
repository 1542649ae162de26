"""Settings for everything that connects the guard to the outside world: gate, repo, chain, alerts,
HTTP port and logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from miner_guard.config.ranges import AtLeastOne, Count, NotNegative, Positive, Range


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

    inputs_max_age_s: ClassVar[float] = 300.0
    """Repo and network facts in gate-inputs.json that are older than this count as unknown."""


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

    region: str = "auto"
    """`s3`: the region (`auto` for R2)."""

    repo_id: str | None = None
    """`hf`: owner/name."""

    credentials: Literal["env", "dotenv", "file"] = "env"
    """Where the guard reads the keys from; never the command line."""

    credentials_file: str | None = None
    """`dotenv`: the miner's `.env` file; `file`: a TOML file with the keys."""

    refresh_every_s: Positive = 60.0
    """Interval between repo checks."""

    timeout_s: Positive = 20.0
    """Deadline for one check."""

    verify_uploads: bool = True
    """Verify the repo after each reported push."""

    audit_every_s: NotNegative | None = None
    """Seconds between audits; the guard also audits after each verified push. 0: only on
    demand. None: 600 if the profile defines what validators accept, otherwise 0."""


@dataclass(frozen=True)
class ChainSettings:
    """The chain; the guard reads public data only."""

    network: str | None = None
    """Name or ws:// URL for bittensor. None: the guard does not read the chain."""

    netuid: Annotated[int, Range(ge=0)] | None = None
    """The subnet."""

    hotkey: str | None = None
    """ss58 address of the miner's hotkey (public)."""

    master_uid: Annotated[int, Range(ge=0)] | None = None
    """uid whose repo publishes the network's outer step."""

    blocks_per_allreduce: Annotated[int, Range(ge=1)] | None = None
    """Number of blocks between AllReduces that the gate and the audit assume. None: the profile's
    value (subnet 38: 400; its master uses 750 after its first successful AllReduce)."""

    refresh_every_s: Positive = 120.0
    """Interval between chain queries."""

    timeout_s: Positive = 30.0
    """Deadline for one query."""


@dataclass(frozen=True)
class AlertSettings:
    """Who gets notified, and about what."""

    urls: tuple[str, ...] = ()
    """Apprise URLs. Set them through MINER_GUARD_ALERTS__URLS, because they contain secrets."""

    preset: Literal["overnight"] | None = None
    """`overnight`: alert on stalls, an exploding loss, missing checkpoints and all other problems
    (source 003)."""

    min_level: Literal["info", "warning", "error", "critical"] = "error"
    """Lowest event level that the guard sends."""

    events: tuple[str, ...] = ()
    """Names of additional events to send, whatever their level."""

    cooldown_s: NotNegative = 900.0
    """Shortest time before the guard repeats an alert."""

    heartbeat_url: str | None = None
    """URL that the guard pings while the miner is making progress."""

    heartbeat_every_s: Positive = 300.0
    """Interval between pings."""


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

    trusted_hosts: tuple[str, ...] = ()
    """Host names under which browsers may reach the port if no token is set, in addition to
    `localhost` and IP addresses."""


@dataclass(frozen=True)
class OtelSettings:
    """OpenTelemetry. Headers, certificates, timeout and compression come from the SDK's own
    variables (`OTEL_EXPORTER_OTLP_HEADERS` and so on)."""

    endpoint: str | None = None
    """Base URL of an OTLP/HTTP receiver, such as http://127.0.0.1:4318; `/v1/logs` and
    `/v1/metrics` are appended. None: the guard exports nothing."""

    min_level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    """Lowest event level that the guard exports."""

    metrics_every_s: Positive = 60.0
    """Interval between metric exports (the SDK's default)."""


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

    keep_incidents: AtLeastOne = 50
    """How many folders of evidence to keep under incidents/. The newest are kept; each takes up to
    about 1 MB per rank."""

    step_lines_per_s: Positive = 5.0
    """Limit on step lines per second on the console and in guard.jsonl. The guard logs how many it
    left out."""

    classify: bool = True
    """Search the miner's output for incidents."""
