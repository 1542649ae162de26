"""Supervision settings: hangs, restarts, health, and what monitoring may cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from miner_guard.config.ranges import Count, NotNegative, Percent, Positive, Share


@dataclass(frozen=True)
class HangSettings:
    """Time limits after which the guard treats missing progress as a hang."""

    min_s: Positive = 300.0
    """Shortest time without a step that counts as a hang."""

    factor: Positive = 5.0
    """The limit is at least this many times the longest recent step (NVRx's calculated timeout)."""

    first_step_s: Positive = 1800.0
    """Time allowed for the miner to download, load and compile before its first step."""

    first_step_notice_s: ClassVar[float] = 90.0
    """After this long without a step, the guard reports that it has seen none, and quotes the line
    that most resembles a step."""

    allreduce_s: Positive = 840.0
    """Time allowed for the `allreduce` phase (subnet 38)."""

    upload_s: ClassVar[float] = 1800.0
    """Time allowed for the `upload` phase."""

    load_state_s: ClassVar[float] = 1800.0
    """Time allowed for the `load_state` phase."""

    pause_s: ClassVar[float] = 1800.0
    """Time allowed for the `pause` phase."""

    evaluation_s: ClassVar[float] = 1800.0
    """Time allowed for the `inference`, `val_loss`, `example_loss` and `monitor` phases."""

    monitoring_s: Positive = 1800.0
    """Time allowed for an operation inside `tracker.track()` or `guard.track()`."""

    checkpoint_s: ClassVar[float] = 1800.0
    """Time allowed for the `checkpoint` phase."""

    exit_s: Positive = 330.0
    """How long the miner's process may keep running after all ranks have finished training.

    Keep it longer than torchrun's exit barrier: a node that has finished waits that long for the
    other nodes, even for a lost one."""

    gone_s: Positive = 45.0
    """How long a launcher may take to end the other ranks after one has died. Keep it longer than
    the 30 s that torchrun gives them after SIGTERM."""

    phases: dict[str, float] = field(default_factory=dict)
    """Time allowed for additional phases, by name, in seconds."""

    stack_timeout_s: Positive = 10.0
    """How long the guard waits for the ranks' stacks."""

    action: Literal["restart", "stop", "warn"] = "restart"
    """What the guard does about a hang after it has stored the evidence."""

    @property
    def allowances(self) -> dict[str, float]:
        """Time limits, in seconds, of the phases that have their own."""
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
    """Restart the miner after a failure. False (`--no-restart`): `run` exits with the miner's exit
    code."""

    max_restarts: Count = 5
    """After this many restarts without a healthy stretch in between, the next failure counts as a
    crash loop (exit code 75)."""

    backoff_s: NotNegative = 2.0
    """Wait before the first restart. The wait doubles with each restart after that."""

    outage_backoff_s: ClassVar[float] = 20.0
    """Wait before the first restart after a network, storage or chain outage. With the defaults,
    the waits add up to ten minutes before the guard declares a crash loop."""

    backoff_max_s: Positive = 300.0
    """Longest wait before a restart."""

    jitter_ratio: Share = 0.1
    """Random share added to each wait, so that many miners do not restart at the same moment."""

    healthy_s: ClassVar[float] = 600.0
    """The guard resets the restart count when a launch has been running for this long and is
    training."""


@dataclass(frozen=True)
class HealthSettings:
    """Host and GPU samplers, HEALTH lines, other nodes and checkpoints."""

    snapshot_every_s: Positive = 60.0
    """Interval between HEALTH lines."""

    sample_every_s: Positive = 10.0
    """Interval between samples."""

    sampler_timeout_s: Positive = 5.0
    """Deadline for one sampler."""

    disk_min_free_gb: NotNegative = 5.0
    """The guard warns if there is less free disk space than this."""

    shm_min_gb: ClassVar[float] = 1.0
    """The guard warns if /dev/shm is smaller than this: NCCL and data loaders fail with Docker's
    64 MB."""

    node_check_every_s: Positive = 5.0
    """Interval between reachability checks of other nodes in a multi-node run."""

    node_timeout_s: Positive = 3.0
    """How long another node may take to answer."""

    clock_skew_max_s: ClassVar[float] = 60.0
    """The guard warns if the local clock differs by more than this from the Date header that the
    storage sends."""

    checkpoint_dir: str | None = None
    """Folder in which the guard watches the age and size of checkpoints. None: the guard knows only
    about checkpoints that the hook reports."""

    checkpoint_max_age_s: Positive = 3600.0
    """The guard reports `CHECKPOINT STALE` if the newest checkpoint is older than this."""


@dataclass(frozen=True)
class CostSettings:
    """Limits on what monitoring may cost (source 000)."""

    preset: Literal["production", "research", "final_evaluation"] | None = None
    """One of source 000's presets, which sets the budget below."""

    budget_pct: Percent = 5.0
    """Share of training time that monitoring may take."""

    critical_pct: Percent = 10.0
    """Share of training time above which the event is critical rather than a warning."""

    operation_warn_s: Positive = 30.0
    """The guard warns if a single operation takes longer than this."""

    throttle: bool = False
    """Allow `tracker.due(name)` to lengthen intervals while monitoring is over budget."""
