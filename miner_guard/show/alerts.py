"""Decides which events raise an alert, and delivers them from threads of their own; each attempt is
a child process with a deadline (`miner_guard.show.alert_send`)."""

from __future__ import annotations

import heapq
import itertools
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from miner_guard.config import AlertSettings, optional_deps
from miner_guard.rank.layout import Now, StepRecord
from miner_guard.record.events import LEVELS, Event, degraded, event
from miner_guard.record.status_document import StatusDocument
from miner_guard.record.words import counted, visible
from miner_guard.system import probe
from miner_guard.system.clock import Clock
from miner_guard.watch.base import Context, Monitor
from miner_guard.watch.state_words import lines_of, problem

OVERNIGHT = frozenset(
    {
        "hang_detected",
        "miner_exited",
        "crash_loop",
        "slow_step",
        "straggler",
        "loss_nan",
        "eval_loss_nan",
        "loss_spike",
        "loss_divergence",
        "checkpoint_skipped",
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
        "guard_killed",
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
    "job_recovered": frozenset({"job_failed"}),
    "straggler": frozenset({"straggler"}),
    "network_unreachable": frozenset({"network_unreachable"}),
    "disk_recovered": frozenset({"disk_full", "disk_stuck"}),
    "checkpoint_saved": frozenset({"checkpoint_skipped"}),
}
"""The problems that each event resolves; at level info, an event resolves those of its own name."""

BY_PROGRESS = frozenset({"hang_detected", "miner_exited", "miner_restarting"})
"""Problems that are resolved once the miner is completing steps again."""

_SAME = ("label", "sampler", "job", "check", "gpu", "node", "what")
"""Fields that distinguish two events of the same event."""

_MAX_OPEN = 256


@dataclass(frozen=True)
class Alert:
    """A message to send."""

    event: str
    level: str
    title: str
    body: str
    resolves: bool = False
    """Whether it says that a problem is over."""


class AlertPolicy:
    """Judges each event; remembers at most 256 reported problems."""

    def __init__(self, settings: AlertSettings, clock: Clock, who: str) -> None:
        """`who` names the miner in every title."""
        self._settings, self._clock, self._who = settings, clock, who
        self._overnight = OVERNIGHT if settings.preset == "overnight" else frozenset[str]()
        self._sent_at: dict[tuple[str, str], float] = {}
        self._held_back: dict[tuple[str, str], int] = {}
        self._open: dict[tuple[str, str], str] = {}

    def observe(self, event: Event) -> Iterator[Alert]:
        """Yield the alerts that an event triggers: one for the event itself, or the resolution
        of earlier ones."""
        for ended in _ENDS.get(event.name, ()):
            if ended == event.name and event.level != "info":
                continue
            yield from self._ended(ended, visible(event.text), _key(event)[1])
        if self._selected(event) and (alert := self._problem(event)) is not None:
            yield alert

    def progressed(self) -> Iterator[Alert]:
        """Resolve the problems that had stopped training: the miner has completed steps."""
        for ended in dict.fromkeys(key[0] for key in self._open if key[0] in BY_PROGRESS):
            yield from self._ended(ended, "the miner is completing steps again", "")

    def _selected(self, event: Event) -> bool:
        if event.name in _NEVER:
            return False
        severity = LEVELS[event.level]
        if event.name in self._overnight and severity >= LEVELS["warning"]:
            return True
        return event.name in self._settings.events or severity >= LEVELS[self._settings.min_level]

    def _problem(self, event: Event) -> Alert | None:
        key, now = _key(event), self._clock.monotonic()
        if now - self._sent_at.get(key, float("-inf")) < self._settings.cooldown_s:
            self._held_back[key] = self._held_back.get(key, 0) + 1
            return None
        line = visible(event.text)
        if len(self._sent_at) >= _MAX_OPEN:
            oldest = next(iter(self._sent_at))
            del self._sent_at[oldest]
            self._open.pop(oldest, None)
            self._held_back.pop(oldest, None)
        self._sent_at[key], self._open[key] = now, line
        more = self._held_back.pop(key, 0)
        body = f"{line}\n({more} more of these were suppressed)" if more else line
        title = f"[{self._who}] {event.level.upper()}: {event.name}"
        return Alert(event.name, event.level, title, body)

    def _ended(self, event: str, words: str, detail: str) -> Iterator[Alert]:
        for key in [key for key in self._open if key[0] == event and detail in ("", key[1])]:
            problem = self._open.pop(key)
            self._sent_at.pop(key, None)
            title = f"[{self._who}] RESOLVED: {event}"
            yield Alert(event, "info", title, f"{words}\nwas: {problem}", resolves=True)


def _key(event: Event) -> tuple[str, str]:
    detail = next((str(event.fields[name]) for name in _SAME if name in event.fields), "")
    return (event.name, detail if event.rank is None else f"{detail} rank {event.rank}".strip())


SENDER = "miner_guard.show.alert_send"
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

    def __init__(self, targets: Sequence[str], report: Callable[[Event], None]) -> None:
        """`report` is called, from any thread, with an event for each alert that was sent or
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


_HEARTBEAT_S = 15.0
_GATHER_S = 3.0
_MAX_LINES = 8


class AlertsMonitor(Monitor):
    """Sends alerts if `[alerts] urls` is set, and heartbeats if `heartbeat_url` is set.

    What follows one fault within `_GATHER_S` goes into one message. By then the status shows the
    fault too, so that the message says the same as every other surface.
    """

    name = "alerts"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        settings = context.config.alerts
        self._settings = settings
        self._policy = AlertPolicy(
            settings, context.clock, f"{socket.gethostname()}/{context.state.root.name}"
        )
        self._outbox = AlertQueue(settings.urls, self._report)
        self._gathered: list[Alert] = []
        self._send_at = math.inf
        self._told_of_stop = False
        """Whether a message has told of a miner that stands still. Until it steps again, further
        crashes and hangs belong to that message."""

        if settings.urls and (missing := optional_deps.problem("alerts")) is not None:
            context.emit(degraded(f"no alert will be delivered: {missing}"))
        if settings.heartbeat_url:
            every_s = context.config.health.snapshot_every_s
            context.jobs.every("heartbeat", every_s, self._heartbeat, first_after_s=5.0)

    def on_event(self, event: Event) -> Iterable[Event]:
        if self._settings.urls:
            self._gather(self._policy.observe(event))
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Event]:
        if self._settings.urls:
            self._gather(self._policy.progressed())
            self._told_of_stop = False
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        if now >= self._send_at:
            self._send()
        return ()

    def _gather(self, alerts: Iterator[Alert]) -> None:
        for alert in alerts:
            if self._told_of_stop and alert.event in BY_PROGRESS and not alert.resolves:
                continue
            if self._gathered and self._gathered[0].resolves != alert.resolves:
                # A problem and its end are two messages, however short it was.
                self._send()
            if not self._gathered:
                self._send_at = self.context.clock.monotonic() + _GATHER_S
            self._gathered.append(alert)

    def _send(self) -> None:
        """Send what has gathered as one message: the worst event leads, then the state as it is
        now and the next step."""
        alerts, self._gathered, self._send_at = self._gathered, [], math.inf
        if not alerts:
            return
        self._told_of_stop |= any(a.event in BY_PROGRESS and not a.resolves for a in alerts)
        # An event may quote the miner, a server or a library; the state is the guard's own.
        redactor = self.context.redactor
        first = max(alerts, key=lambda alert: LEVELS[alert.level])
        events = list(dict.fromkeys(alert.body for alert in (first, *alerts)))
        if more := events[_MAX_LINES:]:
            events[_MAX_LINES:] = [f"and {counted(len(more), 'more line')}: `miner-guard logs`"]
        state = lines_of(StatusDocument.from_json(self.context.status()))
        body = "\n".join([*map(redactor.public, events), *map(redactor.text, state)])
        self._outbox.put(replace(first, title=redactor.public(first.title), body=body))

    def _report(self, event: Event) -> None:
        """Redact an event and log it. Called from the outbox's threads."""
        self.context.emit(replace(event, fields=self.context.redactor.value(event.fields)))

    def _heartbeat(self) -> None:
        status = StatusDocument.from_json(self.context.status())
        if problem(status) is not None:
            # The missing ping is the signal: the monitoring service alerts on its absence.
            return
        answer = probe.ask(SENDER, {"heartbeat_url": self._settings.heartbeat_url}, _HEARTBEAT_S)
        if not answer.known:
            raise ConnectionError(self.context.redactor.text(answer.reason or ""))

    def on_stop(self) -> Iterable[Event]:
        self._send()
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
    request = {"within_s": WITHIN_S, "messages": messages}
    answer = probe.ask(SENDER, request, WITHIN_S + START_S)
    if not answer.known:
        return answer
    if answer.value:
        return replace(answer, value=None, reason="; ".join(answer.value.values()))
    return replace(answer, value=len(messages))
