"""Alerts: decides what to send, and queues it in the outbox."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from miner_guard.config import AlertSettings, optional_deps
from miner_guard.eventlog.catalog import Finding
from miner_guard.eventlog.status_document import StatusDocument
from miner_guard.rank.layout import StepRecord
from miner_guard.record.events import degraded
from miner_guard.reporting import alert_queue, progress
from miner_guard.reporting.alert_policy import Alert, AlertPolicy
from miner_guard.reporting.alert_queue import AlertQueue
from miner_guard.system import probe
from miner_guard.system.clock import iso_utc
from miner_guard.watch.base import Context, Monitor
from miner_guard.watch.state import Memory, advice, headline, judge

_HEARTBEAT_S = 15.0


class AlertsMonitor(Monitor):
    """Sends alerts if `[alerts] urls` is set, and heartbeats if `heartbeat_url` is set."""

    name = "alerts"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        settings = context.config.alerts
        self._settings = settings
        self._policy = AlertPolicy(
            settings, context.clock, f"{socket.gethostname()}/{context.state.root.name}"
        )
        self._outbox = AlertQueue(settings.urls, self._report)
        self._memory = Memory()
        if settings.urls and (problem := optional_deps.problem("alerts")) is not None:
            context.emit(degraded(f"no alert will be delivered: {problem}"))
        if settings.heartbeat_url:
            context.jobs.every(
                "heartbeat", settings.heartbeat_every_s, self._heartbeat, first_after_s=5.0
            )

    def on_finding(self, finding: Finding) -> Iterable[Finding]:
        self._memory.take(finding)
        if self._settings.urls:
            self._put(self._policy.observe(finding))
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Finding]:
        self._memory.stepped(steps[-1].loss)
        if self._settings.urls:
            self._put(self._policy.progressed())
        return ()

    def _put(self, alerts: Iterator[Alert]) -> None:
        for alert in alerts:
            redact = self.context.redactor.text
            body = f"{self._verdict()}\n{alert.body}"
            self._outbox.put(replace(alert, title=redact(alert.title), body=redact(body)))

    def _verdict(self) -> str:
        """Return the current verdict and the next step to take. The `verdict` monitor waits until
        a condition has lasted a while; an alert does not."""
        status = StatusDocument.from_json(self.context.status())
        now = judge(status, self._memory)
        known = status.verdict
        since = known.since if known is not None and known.state == now.state else None
        verdict = now.status(since or iso_utc(self.context.clock.wall() - self._memory.silent_s))
        step = advice(verdict)
        return headline(verdict) + (f"\nNext: {step}" if step else "")

    def _report(self, finding: Finding) -> None:
        """Redact a finding and log it. Called from the outbox's threads."""
        self.context.emit(replace(finding, fields=self.context.redactor.value(finding.fields)))

    def _heartbeat(self) -> None:
        status = StatusDocument.from_json(self.context.status())
        if (
            progress.problem(status, 0.0, self.context.clock.wall(), self.context.config.hang)
            is not None
        ):
            # The missing ping is the signal: the monitoring service alerts on its absence.
            return
        answer = probe.ask(
            alert_queue.SENDER, {"heartbeat_url": self._settings.heartbeat_url}, _HEARTBEAT_S
        )
        if not answer.known:
            raise ConnectionError(self.context.redactor.text(answer.reason or ""))

    def on_stop(self) -> Iterable[Finding]:
        self._outbox.close()
        return ()

    def lingers(self) -> bool:
        return self._outbox.waiting > 0

    def snapshot(self) -> Mapping[str, Any]:
        box = self._outbox
        return {
            "targets": len(self._settings.urls),
            "waiting": box.waiting,
            "sent": box.sent,
            "failed": box.failed,
            "dropped": box.dropped,
        }


def send_test(settings: AlertSettings) -> probe.Answer:
    """Send a test message to every configured target. The answer's value is the number of targets.
    If any target did not accept the message, the answer is unknown and gives the reasons."""
    title, body = (
        f"[{socket.gethostname()}] miner-guard test",
        "This is a test message from miner-guard. Alerts sent to this target reach you.",
    )
    messages = [
        {"id": number, "target": number, "url": url, "level": "info", "title": title, "body": body}
        for number, url in enumerate(settings.urls, 1)
    ]
    request = {"within_s": alert_queue.WITHIN_S, "messages": messages}
    answer = probe.ask(alert_queue.SENDER, request, alert_queue.WITHIN_S + alert_queue.START_S)
    if not answer.known:
        return answer
    if answer.value:
        return replace(answer, value=None, reason="; ".join(answer.value.values()))
    return replace(answer, value=len(messages))
