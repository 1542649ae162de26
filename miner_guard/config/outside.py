"""Settings of the outside world: gate, repo and chain; alerts, HTTP port and logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from miner_guard.config.ranges import AtLeastOne, Count, NotNegative, Positive, Range


@dataclass(frozen=True)
class GateSettings:
    """What may be uploaded: the operator's numbers for the gate's rules. A profile changes them."""

    mode: Literal["enforce", "shadow"] = "enforce"
    """`enforce` blocks; `shadow` says what it would do and blocks nothing."""

    min_inner_step: Count = 50
    """Inner steps below this are blocked (source 004; subnet 38's validators reject 0 only)."""

    min_inner_step_after_allreduce: Count | None = None
    """The minimum while what is published is the archive of an AllReduce (inner step 0), which
    scores nothing. None: `min_inner_step`. Subnet 38's validators accept from 1 on."""

    min_upload_interval_s: NotNegative = 0.0
    """The gate blocks an upload while the published one is younger than this. 0: never."""

    repo_age_target_s: Positive = 1800.0
    """Repo age from which an upload is due (source 004: keep < 1800 s)."""

    repo_age_limit_s: Positive = 2000.0
    """Repo age from which the repo is stale (source 004: < 2000 s)."""

    broadcast_timeout_s: Positive = 60.0
    """How long the ranks wait for rank 0's decision before they block locally."""

    inputs_max_age_s: Positive = 300.0
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
    """Where the guard reads the keys; never from a command line."""

    credentials_file: str | None = None
    """`dotenv`: the `.env` as the miner uses it; `file`: a TOML file with the keys."""

    refresh_every_s: Positive = 60.0
    """Interval of the repo checks."""

    timeout_s: Positive = 20.0
    """Deadline for one check."""

    verify_uploads: bool = True
    """Verify the repo after each reported push."""

    audit_every_s: NotNegative | None = None
    """Seconds between two audits; one also follows each verified push. 0 runs none by itself. None:
    600 where a profile says what validators accept, else 0."""

    audit_bytes_per_hour: Count = 2_000_000_000
    """What these audits may fetch in an hour; gradients that have not changed are not fetched
    again."""


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
    """Blocks between two AllReduces, by which the gate and the audit judge. None: the profile's
    (subnet 38: 400; its master has 750 from its first successful AllReduce on)."""

    refresh_every_s: Positive = 120.0
    """Interval of the chain queries."""

    timeout_s: Positive = 30.0
    """Deadline of one look."""


@dataclass(frozen=True)
class AlertSettings:
    """Whom the guard notifies."""

    urls: tuple[str, ...] = ()
    """Apprise URLs; better given through MINER_GUARD_ALERTS__URLS, they hold secrets."""

    preset: Literal["overnight"] | None = None
    """`overnight`: stalls, loss explosion, nothing saved, any problem (source 003)."""

    min_level: Literal["info", "warning", "error", "critical"] = "error"
    """Lowest level of the events that are sent."""

    events: tuple[str, ...] = ()
    """Further events, whatever their level."""

    cooldown_s: NotNegative = 900.0
    """Shortest time before the same alert is repeated."""

    heartbeat_url: str | None = None
    """URL that the guard pings while the miner makes progress."""

    heartbeat_every_s: Positive = 300.0
    """Interval of the pings."""


@dataclass(frozen=True)
class HttpSettings:
    """The HTTP port."""

    port: Annotated[int, Range(ge=0, le=65535)] | None = None
    """None: no port. 0: any free one."""

    host: str = "127.0.0.1"
    """Address to listen on; any but loopback needs a token."""

    token: str | None = None
    """Bearer token; better given through MINER_GUARD_HTTP__TOKEN. Off loopback at least 16
    characters."""

    trusted_hosts: tuple[str, ...] = ()
    """Names under which browsers may ask where no token is set, besides `localhost` and any IP
    address."""


@dataclass(frozen=True)
class OtelSettings:
    """OpenTelemetry. Headers, certificates, timeout and compression come from the SDK's own
    variables (`OTEL_EXPORTER_OTLP_HEADERS` and so on)."""

    endpoint: str | None = None
    """Base URL of an OTLP/HTTP receiver, such as http://127.0.0.1:4318; `/v1/logs` and
    `/v1/metrics` are appended. None: the guard exports nothing."""

    min_level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    """Lowest level of the events that are exported."""

    metrics_every_s: Positive = 60.0
    """Interval of the metrics (the SDK's default)."""


@dataclass(frozen=True)
class LogSettings:
    """Console line and guard.jsonl."""

    emoji: bool = True
    """Print the documents' emoji before the words."""

    level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    """Lowest level printed on the console; guard.jsonl holds every level."""

    max_bytes: AtLeastOne = 50_000_000
    """Size at which guard.jsonl is rotated."""

    keep: Count = 10
    """Rotated files kept."""

    keep_incidents: AtLeastOne = 50
    """Folders of evidence kept under incidents/, the newest; each holds up to about 1 MB per
    rank."""

    step_lines_per_s: Positive = 5.0
    """Step lines per second on the console and in guard.jsonl; a line counts those left out."""

    classify: bool = True
    """Look for incidents in the relayed output."""
