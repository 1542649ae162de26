"""Remembers findings with lasting effects, which the verdict needs in addition to the status
document. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from miner_guard.eventlog.catalog import Finding, message
from miner_guard.eventlog.status_document import StepsStatus

_LASTING = frozenset({"loss_nan", "audit_failed", "repo_stale", "cpu_fallback"})
_RECOVERED_SHARE = 0.9
"""Steps count as slow until their median falls below this share of the median at the start of the
slowdown, so that a median near the limit does not change the verdict with each step."""

_ENDED_BY = {
    "audit_passed": ("audit_failed",),
    "upload_succeeded": ("repo_stale",),
    "cpu_fallback": ("cpu_fallback",),
    "miner_started": ("loss_nan", "cpu_fallback"),
}


@dataclass
class Memory:
    """Findings that stay in effect until another finding clears them. Bounded."""

    restart: Mapping[str, Any] | None = None
    hang: str | None = None
    """The last hang, until the next step."""

    crash_loop: str | None = None
    incident: Mapping[str, Any] | None = None
    """Fields of the last incident, until the miner is stepping again."""

    nan: Mapping[str, Any] | None = None
    """Fields of the last `loss_nan`, until the loss is finite again."""

    checkpoint: Mapping[str, Any] | None = None
    """Fields of the last `checkpoint_saved` from before the loss became NaN."""

    gpu_faults: dict[str, str] = field(default_factory=dict)
    disks: dict[str, str] = field(default_factory=dict)
    straggler: str | None = None
    straggler_rank: int | None = None
    silent_s: float = 0.0
    """Seconds without a step when the last hang was found; 0 again after the next step."""

    slow_from_s: float | None = None
    """The median step time when steps became slow; None while steps are not slow."""

    reported: dict[str, str] = field(default_factory=dict)
    """Messages of findings that still hold, by event. The status document may not show a finding
    until a second later, and an alert sent in between must not contradict it."""

    def take(self, finding: Finding) -> None:
        """Update the memory from one finding."""
        fields = finding.fields
        for event in _ENDED_BY.get(finding.event, ()):
            self.reported.pop(event, None)
        if finding.event in _LASTING and fields.get("verdict", "certain") == "certain":
            self.reported[finding.event] = message(finding).partition("\n")[0]
        if finding.event == "miner_restarting":
            self.restart = fields
        elif finding.event == "hang_detected":
            self.hang = str(fields.get("detail"))
            self.silent_s = float(fields.get("idle_s") or 0.0)
        elif finding.event == "crash_loop":
            self.crash_loop = str(fields.get("detail"))
        elif finding.event == "incident":
            self.incident = fields
        elif finding.event == "loss_nan":
            self.nan = fields
        elif finding.event == "checkpoint_saved" and self.nan is None:
            self.checkpoint = fields
        elif finding.event == "straggler":
            self.straggler = f"rank {finding.rank} {fields.get('detail')}"
            self.straggler_rank = finding.rank
        elif finding.event == "straggler_cleared":
            self.straggler = self.straggler_rank = None
        elif finding.event in ("gpu_fault", "gpu_recovered"):
            self._toggle(self.gpu_faults, f"GPU {fields.get('gpu')}", finding, "gpu_fault")
        elif finding.event in ("disk_full", "disk_stuck", "disk_recovered"):
            self._toggle(self.disks, str(fields.get("what")), finding, "disk_full", "disk_stuck")

    def stepped(self, loss: float | None) -> None:
        """Record that training completed a step, so whatever was blocking it has cleared."""
        self.hang = self.restart = self.incident = None
        self.silent_s = 0.0
        if loss is not None and math.isfinite(loss):
            self.reported.pop("loss_nan", None)
            self.nan = None

    def watch(self, steps: StepsStatus) -> None:
        """Update the memory from the latest step times."""
        median_s = steps.p50_s
        if median_s is None:
            self.slow_from_s = None
        elif steps.grade == "bad":
            self.slow_from_s = min(self.slow_from_s or median_s, median_s)
        elif self.slow_from_s is not None and median_s < _RECOVERED_SHARE * self.slow_from_s:
            self.slow_from_s = None

    @staticmethod
    def _toggle(table: dict[str, str], key: str, finding: Finding, *begins: str) -> None:
        if finding.event not in begins:
            table.pop(key, None)
        elif len(table) < 64:
            silent = "it is not responding" if finding.event == "disk_stuck" else None
            fields = finding.fields
            table[key] = str(silent or fields.get("reason") or fields.get("what"))
