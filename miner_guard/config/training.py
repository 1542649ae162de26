"""Settings of training: the miner, its steps, GPUs and curves."""

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
    """The miner, and those of its training settings that the guard needs."""

    profile: str | None = None
    """Name of a profile under `validators/profiles/` (`sn38`, `sn3`, `iota`, `diloco`), or a path
    to one. None: no profile."""

    attach: Literal["sn38", "auto", "log"] | None = None
    """Hook an unmodified miner: `sn38`, `auto` (any script), `log` (read its lines only). None: it
    calls the hook."""

    log_patterns: tuple[str, ...] = ()
    """`attach = "log"`: regular expressions of your own step lines, with the groups of
    attach/patterns.toml."""

    finite: bool | None = None
    """True: an exit code of 0 means that the work is finished, also without
    `guard.close(finished=True)`. False: only that means it. None: with `attach = "auto"` also a
    loop that ran to its end on every rank without an error, else as False."""

    stop_timeout_s: Positive = 45.0
    """Time between SIGTERM and SIGKILL. Longer than torchrun's own 30 s."""

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
    """Rendezvous port that must be free before a start. None: taken from the command; unchecked
    where the command names no port."""


@dataclass(frozen=True)
class StepSettings:
    """Inner-step timing."""

    good_s: Positive = 20.0
    """A step up to this is good (source 004: 10-20 s)."""

    acceptable_s: Positive = 40.0
    """A step up to this is acceptable (source 004: 20-40 s)."""

    slow_s: Positive = 60.0
    """Absolute rule: a step beyond this is slow (source 004)."""

    expected: str = "10-30s"
    """The expected range that the slow-step line prints (source 004)."""

    window: AtLeastOne = 128
    """Number of recent steps of the same kind in the median and the MAD."""

    warmup: Count = 10
    """Steps at the start of a run that are not judged: compilation, cold caches."""

    mad_factor: Positive = 5.0
    """Relative rule: slow beyond median + max(mad_factor · 1.4826 · MAD, min_excess_ratio ·
    median)."""

    min_excess_ratio: Positive = 0.5
    """Smallest excess over the median, as a share of it, that is slow."""

    min_excess_s: NotNegative = 1.0
    """Smallest excess over the median, in seconds, that is slow: a busy host delays short steps by
    fractions of a second, and that is not worth an alert."""

    regression_ratio: Share = 0.75
    """Best historical median / median of the last 32 below this: a lasting slowdown."""

    fast_log_every: AtLeastOne = 10
    """Inner steps between two `Fast log time` lines (source 001)."""

    breakdown_every: AtLeastOne = 200
    """Inner steps between two `TIMING BREAKDOWN` blocks (source 001)."""

    fast_log_max_s: Positive = 1.0
    """Red flag: a fast log that takes longer (source 001)."""

    fast_log_usual_s: Positive = 0.3
    """A fast log usually takes up to this (source 001: 0.1-0.3 s); above it a remark."""

    evaluation_usual_s: Positive = 10.0
    """An evaluation step usually takes up to this (source 001: 5-10 s); above it a remark."""

    inference_usual_pct: Percent = 80.0
    """Usual inference share of an evaluation step (source 001: 60-80 %); above it a remark."""

    val_loss_usual_pct: Percent = 20.0
    """Usual validation share of an evaluation step (source 001: 10-20 %); above it a remark."""

    overhead_good_pct: Percent = 10.0
    """Overhead of an evaluation step above this is an issue, though no red flag (source 001)."""

    overhead_max_pct: Percent = 20.0
    """Red flag: overhead of an evaluation step above this (source 001)."""

    inference_max_pct: Percent = 90.0
    """Red flag: inference share above this (source 001)."""

    val_loss_max_pct: Percent = 50.0
    """Red flag: validation share above this (source 001)."""

    red_flag_min_s: NotNegative = 1.0
    """Evaluation steps shorter than this raise no red flag: their parts are as short as a fast
    log."""

    straggler_window: AtLeastOne = 20
    """Steps over which ranks are compared."""

    straggler_warn_ratio: Share = 0.10
    """(victims' median wait − culprit's wait) / step above this names a straggler."""

    straggler_critical_ratio: Share = 0.20
    """The ratio above which the straggler is critical."""

    straggler_min_s: NotNegative = 0.1
    """A smaller difference in waiting names no straggler, however large its share of a short
    step."""


@dataclass(frozen=True)
class GpuSettings:
    """GPUs: how many are expected, and when they are checked."""

    expect: Union[Literal["auto"], Annotated[int, Range(ge=0)]] = "auto"
    """Number of GPUs required. `auto`: as many as at the last run, else what the profile demands,
    else as many as are present."""

    on_critical: Literal["stop", "warn"] = "stop"
    """Whether a critical preflight finding stops the start."""

    preflight: bool = True
    """Run the preflight before the miner starts."""

    preflight_wait_s: NotNegative = 300.0
    """How long to wait for missing GPUs: a driver may come up late after boot."""

    probe_timeout_s: Positive = 20.0
    """Deadline for one probe; a driver that hangs is a finding and does not hang the guard."""

    probe_patience_s: NotNegative = 160.0
    """How much longer to wait for the miner's interpreter while it reads from disk or computes:
    `import torch` takes a minute from a cold disk."""

    diagnose_timeout_s: Positive = 30.0
    """How long `guard.diagnose` waits for each rank."""

    low_memory_gb: NotNegative = 1.0
    """A GPU in training with less allocated memory than this: the model may be on the CPU
    (source 004)."""

    first_check_s: Positive = 60.0
    """First memory-share check after launch (source 002)."""

    check_every_s: Positive = 150.0
    """Interval of the checks after that (source 002: 120-180 s)."""

    severe_pct: Percent = 50.0
    """Memory share below this is severe under-use (source 002)."""

    optimal_pct: Percent = 70.0
    """The optimal range reaches from here to `near_limit_pct` (source 002)."""

    near_limit_pct: Percent = 90.0
    """Memory share above this is near the limit (source 002)."""

    good_memory_gb: Positive = 15.0
    """From this much used memory on, a low share is no warning on a GPU that computes (source 004:
    15-35 GB is good, whatever the GPU's size)."""

    acceptable_memory_gb: Positive = 10.0
    """Used memory from here to `good_memory_gb` is acceptable (source 004: 10-15 GB)."""

    high_memory_gb: Positive = 35.0
    """Used memory above this exceeds source 004's good range (15-35 GB) of an 80 GB GPU."""

    busy_pct: Percent = 80.0
    """A GPU computes from this utilization on (source 002: 80-95 % is the target)."""

    idle_pct: Percent = 70.0
    """Mean utilization below this while training: monitoring or data loading may be blocking
    (source 000: above 90 % is normal)."""

    drop_pct: Percent = 20.0
    """A memory share that falls by this many points between two checks is a sudden drop (source
    002: 76 % to 45 %)."""

    model_name: str | None = None
    """Architecture, where the hook does not report it; source 002's list tells small from large."""

    large_model_params: AtLeastOne = 100_000_000
    """Models of unknown name count as large from this many parameters."""

    on_underuse: Literal["warn", "relaunch"] = "warn"
    """`relaunch` restarts the miner with a larger batch, at most `max_relaunches` times, and never
    again after an out-of-memory error."""

    batch_argument: str | None = None
    """The argument that `relaunch` rewrites, such as `--neuron.local_batch_size_train`."""

    max_relaunches: Count = 3
    """How often `relaunch` may happen in one run."""

    memory_settle_s: NotNegative = 50.0
    """How long to wait after a stop for GPU memory to return to its level before the launch."""


@dataclass(frozen=True)
class LossSettings:
    """Loss and memory curves; `loss.py`, `divergence.py`, `plateau.py` and `overfit.py` in
    `detectors/` give the source of the constants."""

    window: AtLeastOne = 64
    """Number of recent values that a spike is compared with."""

    warmup: Count = 32
    """Values before the first verdict."""

    mad_factor: Positive = 6.0
    """Spike beyond median + max(mad_factor · 1.4826 · MAD, min_excess_ratio · |median|)."""

    min_excess_ratio: Positive = 0.10
    """Smallest relative excess that is a spike."""

    explosion_ratio: Positive = 2.0
    """Five steps in a row beyond this multiple of the mean are an explosion."""

    divergence_points: AtLeastOne = 30
    """Number of points over which a rising trend is judged."""

    divergence_p: Share = 0.99
    """P(slope > 0) above this is divergence."""

    plateau_steps: AtLeastOne = 1000
    """Steps without a decrease before the guard reports a plateau."""

    overfit_evals: AtLeastOne = 6
    """Consecutive evaluations that must rise while the training loss falls."""

    leak_floor_gb: Positive = 1.0
    """Growth of allocated memory below this is never called a leak."""
