"""Decides which findings raise an alert, when an alert repeats, and what resolves it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from miner_guard.config import AlertSettings
from miner_guard.eventlog import catalog
from miner_guard.eventlog.catalog import LEVELS, Finding
from miner_guard.record.words import visible
from miner_guard.system.clock import Clock

OVERNIGHT = frozenset(
    {
        "hang_detected",
        "miner_exited",
        "crash_loop",
        "slow_step",
        "steps_regressed",
        "straggler",
        "loss_nan",
        "eval_loss_nan",
        "loss_spike",
        "loss_divergence",
        "checkpoint_stale",
        "upload_failed",
        "repo_stale",
        "upload_forecast",
        "audit_failed",
        "incident",
        "cpu_fallback",
        "gpu_fault",
        "gpu_drop",
        "low_gpu_memory",
        "host_warning",
        "network_unreachable",
        "chain_unregistered",
        "guard_degraded",
        "guard_wedged",
        "sampler_failed",
        "job_failed",
        "output_dropped",
    }
)
"""Events in the `overnight` preset (source 003, prompt 3: stalls, loss explosion, nothing saved,
any problem)."""

_NEVER = frozenset({"alert_sent", "alert_failed"})
"""Events that never raise an alert: an alert about an alert would cause a loop."""

_ENDS = {
    "upload_succeeded": frozenset({"upload_failed", "repo_stale", "upload_forecast"}),
    "audit_passed": frozenset({"audit_failed"}),
    "sampler_recovered": frozenset({"sampler_failed"}),
    "job_recovered": frozenset({"job_failed"}),
    "straggler_cleared": frozenset({"straggler"}),
    "network_recovered": frozenset({"network_unreachable"}),
    "peers_joined": frozenset({"peers_lost"}),
    "disk_recovered": frozenset({"disk_full", "disk_stuck"}),
    "checkpoint_saved": frozenset({"checkpoint_stale"}),
}
"""The problems that each event resolves."""

BY_PROGRESS = frozenset({"hang_detected", "miner_exited", "miner_restarting"})
"""Problems that are resolved once the miner is completing steps again."""

_SAME = ("label", "sampler", "job", "check", "gpu", "node", "what")
"""Fields that distinguish two findings of the same event."""

_MAX_OPEN = 256


@dataclass(frozen=True)
class Alert:
    """A message to send."""

    event: str
    level: str
    title: str
    body: str


class AlertPolicy:
    """Judges each finding; remembers at most 256 reported problems."""

    def __init__(self, settings: AlertSettings, clock: Clock, who: str) -> None:
        """`who` names the miner in every title."""
        self._settings, self._clock, self._who = settings, clock, who
        self._overnight = OVERNIGHT if settings.preset == "overnight" else frozenset[str]()
        self._sent_at: dict[tuple[str, str], float] = {}
        self._held_back: dict[tuple[str, str], int] = {}
        self._open: dict[tuple[str, str], str] = {}

    def observe(self, finding: Finding) -> Iterator[Alert]:
        """Yield the alerts that a finding triggers: one for the finding itself, or the resolution
        of earlier ones."""
        for event in _ENDS.get(finding.event, ()):
            yield from self._ended(event, visible(catalog.message(finding)), _key(finding)[1])
        if self._selected(finding) and (alert := self._problem(finding)) is not None:
            yield alert

    def progressed(self) -> Iterator[Alert]:
        """Resolve the problems that had stopped training: the miner has completed steps."""
        for event in BY_PROGRESS:
            yield from self._ended(event, "the miner is completing steps again", "")

    def _selected(self, finding: Finding) -> bool:
        if finding.event in _NEVER:
            return False
        severity = LEVELS[finding.severity]
        if finding.event in self._overnight and severity >= LEVELS["warning"]:
            return True
        return (
            finding.event in self._settings.events or severity >= LEVELS[self._settings.min_level]
        )

    def _problem(self, finding: Finding) -> Alert | None:
        key, now = _key(finding), self._clock.monotonic()
        if now - self._sent_at.get(key, float("-inf")) < self._settings.cooldown_s:
            self._held_back[key] = self._held_back.get(key, 0) + 1
            return None
        line = visible(catalog.message(finding))
        if len(self._sent_at) >= _MAX_OPEN:
            oldest = next(iter(self._sent_at))
            del self._sent_at[oldest]
            self._open.pop(oldest, None)
            self._held_back.pop(oldest, None)
        self._sent_at[key], self._open[key] = now, line
        more = self._held_back.pop(key, 0)
        body = f"{line}\n({more} more of these were suppressed)" if more else line
        title = f"[{self._who}] {finding.severity.upper()}: {finding.event}"
        return Alert(finding.event, finding.severity, title, body)

    def _ended(self, event: str, words: str, detail: str) -> Iterator[Alert]:
        for key in [key for key in self._open if key[0] == event and detail in ("", key[1])]:
            problem = self._open.pop(key)
            self._sent_at.pop(key, None)
            title = f"[{self._who}] RESOLVED: {event}"
            yield Alert(event, "info", title, f"{words}\nwas: {problem}")


def _key(finding: Finding) -> tuple[str, str]:
    detail = next((str(finding.fields[name]) for name in _SAME if name in finding.fields), "")
    return (
        finding.event,
        detail if finding.rank is None else f"{detail} rank {finding.rank}".strip(),
    )
