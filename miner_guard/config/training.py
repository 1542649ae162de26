"""Training settings: the miner, its steps, GPUs and curves. A `ClassVar` is a constant of a judge:
nobody has a reason to turn it, so guard.toml does not know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Union

from miner_guard.config.ranges import AtLeastOne, NotNegative, Percent, Positive, Range


@dataclass(frozen=True)
class MinerSettings:
    """The miner, and the training settings that the guard needs to know."""

    profile: str | None = None
    """Name of a profile under `validators/profiles/` (`sn38`, `iota`, `diloco`), or a path
    to one. None: no profile."""

    attach: Literal["sn38", "auto", "log"] | None = None
    """How to hook an unmodified miner: `sn38`, `auto` (any script), `log` (only read its output).
    None: the miner calls the hook itself."""

    log_patterns: tuple[str, ...] = ()
    """`attach = "log"`: regular expressions for your own step lines, with the groups from
    watch/patterns.toml."""

    finite: bool | None = None
    """True: exit code 0 means that the miner has finished its work, even without
    `guard.close(finished=True)`. False: only that call means it. None: like False, except that with
    `attach = "auto"` a loop that ran to completion on every rank without an error also counts."""

    stop_timeout_s: Positive = 45.0
    """Time between SIGTERM and SIGKILL. Keep it longer than torchrun's own 30 s."""

    cgroup: bool = True
    """Put the miner's processes into their own cgroup (v2) if the host permits it, so that none of
    them escapes. Set it to False if something else manages this host's cgroups."""

    batch_size: AtLeastOne | None = None
    """Samples per micro-batch per rank, in case the hook does not report it."""

    effective_batch_size: AtLeastOne | None = None
    """Samples per inner step across all ranks, in case the hook does not report it."""

    upload_steps: AtLeastOne | None = None
    """Inner steps between uploads, for forecasts."""

    inner_steps_per_outer: AtLeastOne | None = None
    """Inner steps between outer steps, for the ETA."""

    master_port: Annotated[int, Range(ge=1, le=65535)] | None = None
    """Rendezvous port that must be free before the start. None: the port in the command; if the
    command has no port, there is no check."""


@dataclass(frozen=True)
class StepSettings:
    """Inner-step timing."""

    good_s: Positive = 20.0
    """A step that takes up to this long is good (source 004: 10-20 s)."""

    acceptable_s: Positive = 40.0
    """A step that takes up to this long is acceptable (source 004: 20-40 s)."""

    slow_s: Positive = 60.0
    """Absolute rule: a step that takes longer than this is slow (source 004)."""

    expected: str = "10-30s"
    """The expected range that the slow-step line prints (source 004)."""

    window: ClassVar[int] = 128
    """Number of recent steps of the same kind from which the guard computes the median and the
    MAD."""

    warmup: ClassVar[int] = 10
    """Number of steps at the start of a run that the guard does not judge, because of compilation
    and cold caches."""

    mad_factor: ClassVar[float] = 5.0
    """Relative rule: a step is slow if it takes longer than median + max(mad_factor · 1.4826 · MAD,
    min_excess_ratio · median)."""

    min_excess_ratio: ClassVar[float] = 0.5
    """A slow step exceeds the median by at least this fraction of it."""

    min_excess_s: ClassVar[float] = 1.0
    """A slow step exceeds the median by at least this many seconds. A busy host delays short steps
    by fractions of a second, which is not worth an alert."""

    regression_ratio: ClassVar[float] = 0.75
    """The guard reports a lasting slowdown if best earlier median / median of the last 32 steps is
    below this."""

    fast_log_every: AtLeastOne = 10
    """Inner steps between `Fast log time` lines (source 001)."""

    breakdown_every: AtLeastOne = 200
    """Inner steps between `TIMING BREAKDOWN` blocks (source 001)."""

    fast_log_max_s: ClassVar[float] = 1.0
    """A fast log that takes longer than this is a red flag (source 001)."""

    fast_log_usual_s: ClassVar[float] = 0.3
    """A fast log usually takes up to this long (source 001: 0.1-0.3 s). If it takes longer, the
    guard logs a `TIMING REMARK`."""

    evaluation_usual_s: ClassVar[float] = 10.0
    """An evaluation step usually takes up to this long (source 001: 5-10 s). If it takes longer,
    the guard logs a `TIMING REMARK`."""

    inference_usual_pct: ClassVar[float] = 80.0
    """Typical share of an evaluation step spent on inference (source 001: 60-80 %). If inference
    takes more, the guard logs a `TIMING REMARK`."""

    val_loss_usual_pct: ClassVar[float] = 20.0
    """Typical share of an evaluation step spent on validation (source 001: 10-20 %). If validation
    takes more, the guard logs a `TIMING REMARK`."""

    overhead_good_pct: ClassVar[float] = 10.0
    """If overhead takes up more than this share of an evaluation step, the guard logs a
    `TIMING REMARK` (source 001: an issue, but not a red flag)."""

    overhead_max_pct: ClassVar[float] = 20.0
    """An evaluation step that spends more than this share on overhead is a red flag (source
    001)."""

    inference_max_pct: ClassVar[float] = 90.0
    """An evaluation step that spends more than this share on inference is a red flag (source
    001)."""

    val_loss_max_pct: ClassVar[float] = 50.0
    """An evaluation step that spends more than this share on validation is a red flag (source
    001)."""

    red_flag_min_s: ClassVar[float] = 1.0
    """An evaluation step shorter than this raises no red flag, because its parts are as short as a
    fast log."""

    straggler_window: ClassVar[int] = 20
    """Number of steps over which the guard compares the ranks."""

    straggler_warn_ratio: ClassVar[float] = 0.10
    """A rank is a straggler if (the other ranks' median wait − its own wait) / step time is above
    this."""

    straggler_critical_ratio: ClassVar[float] = 0.20
    """A straggler is critical if the ratio defined in `straggler_warn_ratio` is above this."""

    straggler_min_s: ClassVar[float] = 0.1
    """A rank is a straggler only if the waits differ by at least this many seconds, however short
    the steps are."""


@dataclass(frozen=True)
class GpuSettings:
    """GPUs: how many to expect, when to check them, and what counts as good utilization."""

    expect: Union[Literal["auto"], Annotated[int, Range(ge=0)]] = "auto"
    """Number of GPUs required. `auto`: as many as in the last run, otherwise as many as the profile
    requires, otherwise as many as are present."""

    on_critical: Literal["stop", "warn"] = "stop"
    """What the guard does about a critical preflight event: `stop` does not start the miner,
    `warn` starts it anyway."""

    preflight: bool = True
    """Run the preflight before the miner starts."""

    preflight_wait_s: NotNegative = 300.0
    """How long to wait for missing GPUs, because a driver may come up late after boot."""

    probe_timeout_s: Positive = 20.0
    """Deadline for one probe. If a driver hangs, the guard reports it instead of hanging too."""

    probe_patience_s: ClassVar[float] = 160.0
    """How much longer to wait for a probe in the miner's interpreter while it reads from disk or
    computes: `import torch` can take a minute from a cold disk."""

    diagnose_timeout_s: ClassVar[float] = 30.0
    """How long `guard.diagnose` waits for each rank."""

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

    acceptable_memory_gb: ClassVar[float] = 10.0
    """Memory use from here to `good_memory_gb` is acceptable (source 004: 10-15 GB)."""

    high_memory_gb: Positive = 35.0
    """Memory use above this exceeds source 004's good range (15-35 GB) for an 80 GB GPU."""

    busy_pct: ClassVar[float] = 80.0
    """A GPU counts as computing at this utilization or above (source 002: 80-95 % is the
    target)."""

    idle_pct: ClassVar[float] = 70.0
    """If the mean utilization during training is below this, monitoring or data loading may be
    blocking (source 000: above 90 % is normal)."""

    drop_pct: ClassVar[float] = 20.0
    """If the memory share falls by this many percentage points from one check to the next, it is a
    sudden drop (source 002: 76 % to 45 %)."""

    model_name: str | None = None
    """The model's architecture, in case the hook does not report it. Source 002's list classifies
    the architecture as small or large."""

    large_model_params: ClassVar[int] = 100_000_000
    """A model whose name is unknown counts as large if it has at least this many parameters."""

    on_underuse: Literal["warn", "relaunch"] = "warn"
    """`relaunch` restarts the miner with a larger batch, at most `max_relaunches` times, and never
    again after an out-of-memory error."""

    batch_argument: str | None = None
    """The argument that `relaunch` rewrites, such as `--neuron.local_batch_size_train`."""

    max_relaunches: ClassVar[int] = 3
    """How many relaunches one run may have."""

    memory_settle_s: NotNegative = 50.0
    """How long to wait after a stop for GPU memory to fall back to its pre-launch level."""


@dataclass(frozen=True)
class LossSettings:
    """Loss and memory curves. `loss.py`, `divergence.py`, `plateau.py` and `overfit.py` in
    `detectors/` name the sources of the constants."""

    window: ClassVar[int] = 64
    """Number of recent values against which the guard compares a value to detect a spike."""

    warmup: ClassVar[int] = 32
    """Number of values that the guard needs before its first verdict."""

    mad_factor: ClassVar[float] = 6.0
    """A value is a spike if it exceeds median + max(mad_factor · 1.4826 · MAD, min_excess_ratio ·
    |median|)."""

    min_excess_ratio: ClassVar[float] = 0.10
    """A spike exceeds the median by at least this fraction of it."""

    explosion_ratio: ClassVar[float] = 2.0
    """Five consecutive steps above this multiple of the mean are an explosion."""

    divergence_points: ClassVar[int] = 30
    """Number of points over which the guard looks for a rising trend."""

    divergence_p: ClassVar[float] = 0.99
    """The loss diverges if P(slope > 0) is above this."""

    plateau_steps: AtLeastOne = 1000
    """Number of steps without a decrease before the guard reports a plateau."""

    overfit_evals: ClassVar[int] = 6
    """The guard reports overfitting after the evaluation loss rises this many times in a row while
    the training loss falls."""

    leak_floor_gb: ClassVar[float] = 1.0
    """Growth of allocated memory below this is never reported as a leak."""
