"""Settings of the miner's life: hangs, restarts, health, and what watching it may cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from miner_guard.config.ranges import Count, NotNegative, Percent, Positive, Share


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

    evaluation_s: Positive = 1800.0
    """Allowance of the phases `inference`, `val_loss`, `example_loss` and `monitor`."""

    checkpoint_s: Positive = 1800.0
    """Allowance of the phase `checkpoint`."""

    exit_s: Positive = 330.0
    """How long the miner's process may live on after all ranks have ended their training.

    Above torchrun's exit barrier: a node that is done waits so long for the others, also for one
    that is lost.
    """

    gone_s: Positive = 45.0
    """How long a launcher may take to end the other ranks after one died. Above torchrun's 30 s for
    their SIGTERM."""

    phases: dict[str, float] = field(default_factory=dict)
    """Allowances of other phases, by name, in seconds."""

    stack_timeout_s: Positive = 10.0
    """How long gathering the stacks may take."""

    action: Literal["restart", "stop", "warn"] = "restart"
    """What to do after the evidence is stored."""

    @property
    def allowances(self) -> dict[str, float]:
        """How long a phase may last, seconds, by name; those that have no allowance of their own
        are not there."""
        return {
            "allreduce": self.allreduce_s,
            "upload": self.upload_s,
            "load_state": self.load_state_s,
            "pause": self.pause_s,
            "checkpoint": self.checkpoint_s,
            **dict.fromkeys(
                ("inference", "val_loss", "example_loss", "monitor"), self.evaluation_s
            ),
            **self.phases,
        }


@dataclass(frozen=True)
class RestartSettings:
    """Restarts after a failure."""

    enabled: bool = True
    """False: `--no-restart`, the exit code is the miner's own."""

    max_restarts: Count = 5
    """Restarts without a healthy stretch between them before it is a crash loop (exit 75)."""

    backoff_s: NotNegative = 2.0
    """Wait before the first restart; doubles each time."""

    outage_backoff_s: NotNegative = 20.0
    """The same after a failure of the network, of storage or of the chain: with the defaults a
    miner that dies of it has ten minutes of waits before it is a crash loop."""

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
