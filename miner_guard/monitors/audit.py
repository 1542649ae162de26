"""Audits the published repo on a schedule and after each verified push, within a byte budget."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from miner_guard.config import Config
from miner_guard.eventlog.catalog import Finding
from miner_guard.monitors.base import Context, Monitor
from miner_guard.system.once import OncePer
from miner_guard.validators.facts import AllReduce
from miner_guard.validators.limits import Limits
from miner_guard.validators.profiles import chosen, limits_of

if TYPE_CHECKING:
    from miner_guard.uploads.audit import AuditReport, Known

_EVERY_S = 600.0
_REPEAT_S = 3600.0
"""How long to log an unchanged verdict only at debug level."""


class AuditMonitor(Monitor):
    """Runs the audits. Inactive without a repo, or if `[repo] audit_every_s` is 0."""

    name = "audit"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        config = context.config
        self._limits = Limits.of(config.gate, limits_of(config.miner))
        self._known: Known | None = None
        self._allreduce: AllReduce | None = None
        self._running = threading.Lock()
        self._reports = OncePer(_REPEAT_S)
        self._every_s = interval_s(config)
        if self._every_s > 0:
            context.jobs.every("audit", self._every_s, self._audit)

    def on_finding(self, finding: Finding) -> Iterable[Finding]:
        if finding.event == "upload_succeeded" and self._every_s > 0:
            self.context.jobs.once("audit", self._audit)
        elif finding.event == "allreduce_ended":
            self._allreduce = allreduce_of(finding.fields)
        return ()

    def _audit(self) -> None:
        # If an audit is still running, it or the next scheduled one covers the push.
        if not self._running.acquire(blocking=False):
            return
        try:
            report = self._report()
        finally:
            self._running.release()
        finding = report.finding()
        blocked = tuple(v.rule for v in report.verdicts if v.outcome == "block")
        new = self._reports.ask(self.context.clock.monotonic(), (report.outcome, blocked))
        self.context.emit(finding if new else finding.at("debug"))

    def _report(self) -> AuditReport:
        # Import late: a guard that audits nothing does not need the rules.
        from miner_guard.uploads import audit
        from miner_guard.uploads.audit_memory import AuditMemory
        from miner_guard.validators import shapes

        config = self.context.config
        if self._known is None:
            self._known = audit.Known(memory=AuditMemory(config.repo.audit_bytes_per_hour))
        model = shapes.read(self.context.state.shapes)
        known = replace(self._known, model=model, allreduce=self._allreduce)
        return audit.audit_repo(config.repo, config.chain, self._limits, known)


def interval_s(config: Config) -> float:
    """Seconds between audits; 0 if audits are off."""
    if config.repo.kind == "none":
        return 0.0
    if config.repo.audit_every_s is not None:
        return config.repo.audit_every_s
    return _EVERY_S if chosen(config.miner) is not None else 0.0


def allreduce_of(fields: Any) -> AllReduce:
    """Return how an AllReduce ended. `fields` are those of its event, or the `swarm` monitor's
    section of the status."""
    failed = fields.get("reason") is not None
    return AllReduce(str(fields["reason"]) if failed else None)
