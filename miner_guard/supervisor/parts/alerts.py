"""Alerts: decides what is told, and delivers it from a thread of its own through a child with a deadline."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from miner_guard import probe
from miner_guard.config import AlertSettings
from miner_guard.events import Finding, found
from miner_guard.health import progress
from miner_guard.health.alert_policy import Alert, AlertPolicy
from miner_guard.rank.flight import Step
from miner_guard.redact import Redactor
from miner_guard.supervisor.parts import Context, Part

SENDER = "miner_guard.health.alert_send"
DEADLINE_S = 30.0
RETRIES_S = (5.0, 30.0, 120.0)
_WAITING = 64


class Alerts(Part):
    """Without addresses it does nothing. At most 64 messages wait; what comes on top is counted, not kept."""

    name = "alerts"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        settings = context.config.alerts
        self._settings = settings
        self._policy = AlertPolicy(settings, context.clock, f"{socket.gethostname()}/{context.state.root.name}")
        self._redactor = Redactor.for_guard(os.environ, context.config)
        self._queue: queue.Queue[Alert | None] = queue.Queue(_WAITING)
        self._counts = {"sent": 0, "failed": 0, "dropped": 0}
        self._stopping = threading.Event()
        if settings.urls:
            threading.Thread(target=self._deliver_all, name="alerts", daemon=True).start()
        if settings.heartbeat_url:
            context.jobs.every("heartbeat", settings.heartbeat_every_s, self._heartbeat, first_after_s=5.0)

    def on_finding(self, finding: Finding) -> Iterable[Finding]:
        if self._settings.urls:
            self._put(self._policy.observe(finding))
        return ()

    def on_steps(self, rank: int, steps: Sequence[Step]) -> Iterable[Finding]:
        if self._settings.urls:
            self._put(self._policy.progressed())
        return ()

    def _put(self, alerts: Iterator[Alert]) -> None:
        for alert in alerts:
            try:
                self._queue.put_nowait(alert)
            except queue.Full:
                self._counts["dropped"] += 1

    def _deliver_all(self) -> None:
        while (alert := self._queue.get()) is not None:
            self._deliver(alert)

    def _deliver(self, alert: Alert) -> None:
        message = {
            "urls": list(self._settings.urls), "level": alert.level, "title": self._redactor.text(alert.title),
            "body": self._redactor.text(alert.body),
        }  # fmt: skip
        reason = ""
        for wait_s in (0.0, *RETRIES_S):
            if self._stopping.wait(wait_s) and wait_s:
                break
            answer = probe.ask(SENDER, message, DEADLINE_S)
            if answer.known:
                self._counts["sent"] += 1
                self.context.emit(found("alert_sent", alert=alert.title, targets=answer.value))
                return
            reason = answer.reason or ""
        self._counts["failed"] += 1
        self.context.emit(found("alert_failed", alert=alert.title, reason=self._redactor.text(reason)))

    def _heartbeat(self) -> None:
        status = self.context.status()
        if progress.trouble(status, 0.0, self.context.clock.wall(), self.context.config.hang) is not None:
            # Silence is the message: whoever waits for the ping is told by its absence.
            return
        answer = probe.ask(SENDER, {"heartbeat_url": self._settings.heartbeat_url}, DEADLINE_S)
        if not answer.known:
            raise ConnectionError(self._redactor.text(answer.reason or ""))

    def on_stop(self) -> Iterable[Finding]:
        self._stopping.set()
        # What was decided last (a crash loop, say) still goes out, but the end does not wait for a dead webhook.
        deadline = time.monotonic() + 5.0
        while not self._queue.empty() and time.monotonic() < deadline and self._settings.urls:
            time.sleep(0.05)
        return ()

    def snapshot(self) -> Mapping[str, Any]:
        return {"targets": len(self._settings.urls), "waiting": self._queue.qsize(), **self._counts}


def send_test(settings: AlertSettings) -> probe.Answer:
    """Send a test message to all targets of the settings."""
    message = {
        "urls": list(settings.urls), "level": "info", "title": f"[{socket.gethostname()}] miner-guard test",
        "body": "This is a test message of miner-guard. Alerts arrive here.",
    }  # fmt: skip
    return probe.ask(SENDER, message, DEADLINE_S)
