"""Settings of what is trained: the miner, its steps, GPUs and curves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Union

from miner_guard.config.ranges import (
    AtLeastOne,
    Count,
    NotNegative,
    Percent,
    Positive,
    Range,
    Share,
)


@dataclass(frozen=True)
class MinerSettings:
    """The miner that is run, and what is known of its training settings."""

    profile: str | None = None
    """Name of a profile under `validators/profiles/` (`sn38`, `sn3`), or a path to one. None: no
    profile."""

    attach: Literal["sn38", "auto", "log"] | None = None
    """Hook an unmodified miner: `sn38`, `auto` (any script), `log` (read its lines only). None: it
    calls the hook."""

    log_patterns: tuple[str, ...] = ()
    """`attach = "log"`: regular expressions of your own step lines, with the groups of
    attach/patterns.toml."""

    finite: bool = False
    """True: an exit code of 0 means that the work is finished, also without
    `guard.close(finished=True)`."""

    stop_timeout_s: Positive = 45.0
    """How long the miner may take to stop after SIGTERM before SIGKILL. Above torchrun's own 30
    s."""

    cgroup: bool = True
    """Keep the miner's processes in a cgroup (v2) of their own where this is permitted, so that
    none of them escapes. False where something else manages the cgroups of this host."""

    batch_size: AtLeastOne | None = None
    """Samples per micro-batch and rank; used where the hook does not report it."""

    effective_batch_size: AtLeastOne | None = None
    """Samples per inner step over all ranks; used where the hook does not report it."""

    upload_steps: AtLeastOne | None = None
    """Inner steps between two uploads, for forecasts."""

    inner_steps_per_outer: AtLeastOne | None = None
    """Inner steps between two outer steps, for the ETA."""

    master_port: Annotated[int, Range(ge=1, le=65535)] | None = None
    """The rendezvous port that must be free before a start. None: read from the command, else not
    checked."""


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
    """Relative rule: slow beyond median + max(mad_factor · 1.4826 · MAD, min_excess_ratio ·
    median)."""

    min_excess_ratio: Positive = 0.5
    """The least excess over the median that is called slow."""

    min_excess_s: NotNegative = 1.0
    """The same in seconds: a busy host delays short steps by fractions of a second, and nobody need
    look."""

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
    """Shares of an evaluation step shorter than this raise no red flag: its parts are within one
    fast log."""

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
    """GPUs that must be there. `auto`: as many as at the last run, else as the profile demands,
    else as there are."""

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
    """A fall of the memory share by as many points between two checks is a sudden drop (source 002:
    76 % to 45 %)."""

    model_name: str | None = None
    """Name of the architecture, where the hook does not report it: small or large by the document's
    list."""

    large_model_params: AtLeastOne = 100_000_000
    """Models of unknown name count as large from this many parameters."""

    on_underuse: Literal["warn", "relaunch"] = "warn"
    """`relaunch` restarts the miner with a larger batch, at most three times, never past an
    out-of-memory."""

    batch_argument: str | None = None
    """The argument that `relaunch` rewrites, such as `--neuron.local_batch_size_train`."""

    max_relaunches: Count = 3
    """How often `relaunch` may happen in one run."""

    memory_settle_s: NotNegative = 50.0
    """How long to wait, after a stop, for GPU memory to come back to its level from before the
    launch."""


@dataclass(frozen=True)
class LossSettings:
    """Loss and memory curves. Where the constants come from stands in `detectors/loss.py`."""

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
