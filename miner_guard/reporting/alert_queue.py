"""Delivers alerts from separate threads, through a child process with a deadline.

A message that a target did not accept is retried later, after newer ones, so a dead webhook does
not delay other targets, and delays the next alert by at most one deadline.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from miner_guard.eventlog.catalog import Finding
from miner_guard.record.events import event
from miner_guard.record.words import counted
from miner_guard.reporting.alert_policy import Alert
from miner_guard.system import probe

SENDER = "miner_guard.reporting.alert_send"
WITHIN_S = 10.0
"""Time for the targets to accept one batch."""

LAST_WITHIN_S = 7.0
"""Time for the last attempt: together with the child's start, it fits within the 10 s for which the
guard delays its exit."""

START_S = 10.0
"""Time for the child to start on a busy machine."""

RETRIES_S = (5.0, 30.0, 120.0)
MAX_COUNT = 64
"""Maximum number of queued alerts; any more are dropped and counted."""

_AT_ONCE = 16


@dataclass(order=True)
class QueuedAlert:
    """One alert in the queue, with the targets that have not accepted it."""

    due: float
    order: int
    alert: Alert = field(compare=False)
    left: list[int] = field(compare=False)
    """1-based numbers of the targets that have not accepted the alert."""

    tries: int = field(default=0, compare=False)
    reason: str = field(default="", compare=False)


class AlertQueue:
    """A bounded queue; `put` never waits. Without targets it drops every alert."""

    def __init__(self, targets: Sequence[str], report: Callable[[Finding], None]) -> None:
        """`report` is called, from any thread, with a finding for each alert that was sent or
        abandoned."""
        self._targets = tuple(targets)
        self._report = report
        self._changed = threading.Condition()
        self._fresh: deque[QueuedAlert] = deque()
        self._later: list[QueuedAlert] = []
        self._order = itertools.count()
        self._waiting = 0
        self._closing = False
        self.sent = self.failed = self.dropped = 0
        if targets:
            threading.Thread(target=self._work, name="alerts", daemon=True).start()

    @property
    def waiting(self) -> int:
        """Number of alerts neither sent nor abandoned, including those being sent."""
        return self._waiting

    def put(self, alert: Alert) -> None:
        """Queue an alert, which must already be redacted."""
        with self._changed:
            if not self._targets or self._closing or self._waiting >= MAX_COUNT:
                self.dropped += 1
                return
            self._waiting += 1
            targets = list(range(1, len(self._targets) + 1))
            self._fresh.append(QueuedAlert(0.0, next(self._order), alert, targets))
            self._changed.notify()

    def close(self) -> None:
        """Make one last attempt to send all queued alerts, without waiting for an attempt in
        progress."""
        with self._changed:
            self._closing = True
            last = [*self._fresh, *self._later]
            self._fresh.clear()
            self._later.clear()
            self._changed.notify()
        if last:
            # Send the newest first: it explains why the guard exits.
            last.sort(key=lambda parcel: -parcel.order)
            threading.Thread(
                target=self._try, args=(last, LAST_WITHIN_S), name="last alerts", daemon=True
            ).start()

    def _work(self) -> None:
        while parcels := self._next():
            self._try(parcels, WITHIN_S)

    def _next(self) -> list[QueuedAlert]:
        """Wait for alerts to send; return [] once the queue is closing."""
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                due: list[QueuedAlert] = []
                while self._fresh and len(due) < _AT_ONCE:
                    due.append(self._fresh.popleft())
                while self._later and self._later[0].due <= now and len(due) < _AT_ONCE:
                    due.append(heapq.heappop(self._later))
                if due:
                    return due
                self._changed.wait(self._later[0].due - now if self._later else None)
            return []

    def _try(self, parcels: Sequence[QueuedAlert], within_s: float) -> None:
        messages = [(parcel, target) for parcel in parcels for target in parcel.left]
        request = {
            "within_s": within_s,
            "messages": [self._message(n, *message) for n, message in enumerate(messages)],
        }
        answer = probe.ask(SENDER, request, within_s + START_S)
        unsent = dict.fromkeys(map(str, range(len(messages))), "")
        failed: dict[str, str] = (answer.value or {}) if answer.known else unsent
        for parcel in parcels:
            parcel.left, parcel.reason = [], answer.reason or ""
        for number, (parcel, target) in enumerate(messages):
            if str(number) in failed:
                parcel.left.append(target)
                parcel.reason = "; ".join(filter(None, (parcel.reason, failed[str(number)])))
        for parcel in parcels:
            self._settle(parcel)

    def _message(self, number: int, parcel: QueuedAlert, target: int) -> dict[str, Any]:
        url = self._targets[target - 1]
        return {"id": number, "target": target, "url": url, **asdict(parcel.alert)}

    def _settle(self, parcel: QueuedAlert) -> None:
        with self._changed:
            if parcel.left and parcel.tries < len(RETRIES_S) and not self._closing:
                parcel.due = time.monotonic() + RETRIES_S[parcel.tries]
                parcel.tries += 1
                heapq.heappush(self._later, parcel)
                self._changed.notify()
                return
            self.failed += bool(parcel.left)
            self.sent += not parcel.left
        title = parcel.alert.title
        if parcel.left:
            self._report(
                event(
                    "alert_failed",
                    "warning",
                    f"ALERT FAILED: {title}: {parcel.reason}",
                    alert=title,
                    reason=parcel.reason,
                )
            )
        else:
            self._report(
                event(
                    "alert_sent",
                    "info",
                    f"ALERT SENT: {title} to {counted(len(self._targets), 'target')}",
                    alert=title,
                    targets=len(self._targets),
                )
            )
        with self._changed:
            # Count it as done only after the report: the guard's exit waits for that line too.
            self._waiting -= 1
