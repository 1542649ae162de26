"""Decides which events raise an alert, and sends one message when a problem begins and one when it
ends, each with the state as it is then; a thread for each target, so that a dead one delays only
itself."""

from __future__ import annotations

import math
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from miner_guard.config import AlertSettings, optional_deps
from miner_guard.rank.layout import Now, StepRecord
from miner_guard.record.events import LEVELS, Event, degraded, event
from miner_guard.record.redaction import public_around
from miner_guard.record.status_document import StatusDocument
from miner_guard.record.store import RunReader
from miner_guard.record.words import counted, shortened, visible
from miner_guard.show.runbook import rows
from miner_guard.system.clock import Clock
from miner_guard.system.probe import Answer
from miner_guard.watch.base import Context, Monitor
from miner_guard.watch.incident import latest, subject
from miner_guard.watch.state_words import (
    NOTHING,
    TRAINING,
    answers,
    first_words,
    problem,
    read_state,
)

OVERNIGHT = frozenset(
    {
        *("hang_detected", "miner_exited", "crash_loop", "slow_step", "straggler", "loss_nan"),
        *("loss_spike", "loss_divergence", "checkpoint", "upload_failed", "repo_stale"),
        *("upload_forecast", "audit_failed", "incident", "cpu_fallback", "gpu_fault"),
        *("gpu_drop", "low_gpu_memory", "host_warning", "network_unreachable"),
        *("guard_degraded", "guard_killed"),
    }
)
"""Events in the `overnight` preset (source 003, prompt 3: stalls, loss explosion, nothing saved,
any problem)."""

_NEVER, _ALWAYS = frozenset({"alert_sent"}), frozenset({"guard_killed"})
_ALERTS_PART = "alerts"
"""`part` of the events that say that an alert was not delivered: an alert about them would loop."""

_ENDS = {
    "upload_succeeded": frozenset({"upload_failed", "repo_stale", "upload_forecast"}),
    "audit_passed": frozenset({"audit_failed"}),
}
"""The problems that each event resolves; at level info, an event resolves those of its own name."""

BY_PROGRESS = frozenset(
    {"hang_detected", "miner_exited", "miner_restarting", "incident", "stack_dump", "orphan_killed"}
)
"""What belongs to a stop of the miner, which is over once it has trained again for `_LASTS_S`. The
first of them opens the incident with a message; the others join the message that ends it."""

_LASTS_S = 60.0
"""A miner in a crash loop completes steps too: only what lasts this long is an end."""

_SAME = ("label", "sampler", "job", "check", "gpu", "node", "what")
"""Fields that distinguish two events of the same name."""

_MAX_OPEN = 256

Key = tuple[str, str]
"""An event's name, and what distinguishes it from others of that name."""


@dataclass(frozen=True)
class Alert:
    """A message, or a part of one."""

    event: str
    level: str
    body: str
    title: str = ""
    """Of a message; empty for a part of one."""

    resolves: bool = False
    """Whether it says that a problem is over."""


@dataclass
class _Problem:
    """A problem that a message has told of."""

    line: str
    sent_at: float
    held_back: int = 0
    """How often it has come again since."""


class AlertPolicy:
    """Judges each event; remembers at most 256 open problems."""

    def __init__(self, settings: AlertSettings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self._overnight = OVERNIGHT if settings.preset == "overnight" else frozenset[str]()
        self._open: dict[Key, _Problem] = {}

    def observe(self, event: Event) -> Iterator[Alert]:
        """Yield the alerts that an event triggers: one for the event itself, or the resolution of
        earlier ones. An event at level info ends the problem of its own name, except a stop's."""
        key = _key(event)
        if event.level == "info" and event.name not in BY_PROGRESS:
            yield from self._ended(event.name, visible(event.text), key[1])
        for ended in _ENDS.get(event.name, ()):
            yield from self._ended(ended, visible(event.text), key[1])
        if self._selected(event) and (alert := self._problem(event, key)) is not None:
            yield alert

    def progressed(self) -> Iterator[Alert]:
        """Resolve the problems that had stopped training: the miner has completed steps."""
        for ended in dict.fromkeys(key[0] for key in self._open if key[0] in BY_PROGRESS):
            yield from self._ended(ended, "", "")

    def _selected(self, event: Event) -> bool:
        if event.name in _NEVER or event.fields.get("part") == _ALERTS_PART:
            return False
        severity = LEVELS[event.level]
        if event.name in self._overnight | _ALWAYS and severity >= LEVELS["warning"]:
            return True
        return event.name in self._settings.events or severity >= LEVELS[self._settings.min_level]

    def _problem(self, event: Event, key: Key) -> Alert | None:
        now, before = self._clock.monotonic(), self._open.get(key)
        if before is not None and now - before.sent_at < self._settings.cooldown_s:
            before.held_back += 1
            return None
        if len(self._open) >= _MAX_OPEN:
            self._open.pop(next(iter(self._open)))
        line, more = visible(event.text), 0 if before is None else before.held_back
        self._open[key] = _Problem(line, now)
        body = f"{line}\n({more} more of these were suppressed)" if more else line
        return Alert(event.name, event.level, body)

    def _ended(self, name: str, words: str, detail: str) -> Iterator[Alert]:
        for key in [key for key in self._open if key[0] == name and detail in ("", key[1])]:
            before = self._open.pop(key).line
            yield Alert(name, "info", f"{words}\nwas: {before}".strip(), resolves=True)


def _key(event: Event) -> Key:
    detail = next((str(event.fields[name]) for name in _SAME if name in event.fields), "")
    if event.name in ("disk_full", "disk_stuck"):
        detail = ""
    return (event.name, detail if event.rank is None else f"{detail} rank {event.rank}".strip())


# --- delivery ---

RETRIES_S = (5.0, 30.0)
"""Waits before the second and the third try."""

MAX_WAITING = 64
"""Alerts that wait for one target; any more are dropped and counted."""

_TEST_WITHIN_S = 20.0
_TIMEOUT_S = 10.0
_TYPES = {"critical": "failure", "error": "failure", "warning": "warning"}
_loading = threading.Lock()
"""The first address makes Apprise import its plugins; a thread that looks one up meanwhile finds an
incomplete list."""


class Target:
    """One address, with a daemon thread that delivers to it. Its words name only the kind of
    address, because the rest is secret."""

    def __init__(self, number: int, url: str, report: Callable[[Event], None]) -> None:
        self.name = f"target {number} ({url.partition(':')[0]})"
        self._url, self._report = url, report
        self._alerts: queue.Queue[Alert] = queue.Queue(MAX_WAITING)
        self._service: Any = None
        self._closing = threading.Event()
        self.dropped = 0
        threading.Thread(target=self._work, name=self.name, daemon=True).start()

    @property
    def waiting(self) -> int:
        """Number of alerts neither sent nor given up."""
        return self._alerts.unfinished_tasks

    def put(self, alert: Alert) -> None:
        """Queue an alert, which must already be redacted; never waits."""
        try:
            self._alerts.put_nowait(alert)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Try once more what waits for its next try."""
        self._closing.set()

    def _work(self) -> None:
        while True:
            alert = self._alerts.get()
            problem = self.deliver(alert)
            for wait_s in RETRIES_S:
                if problem is None:
                    break
                last = self._closing.wait(wait_s)
                problem = self.deliver(alert)
                if last:
                    break
            self._tell(alert, problem)
            # Count it as done only after the report: the guard's exit waits for that line too.
            self._alerts.task_done()

    def _tell(self, alert: Alert, problem: str | None) -> None:
        if problem is None:
            told = shortened(alert.title.partition(": ")[2], _MAX_TOLD)
            words = f"ALERT SENT: to {self.name}: {told}"
            self._report(event("alert_sent", "info", words, alert=alert.title, target=self.name))
        else:
            self._report(degraded(f"alert not sent: {problem}: {alert.title}", part=_ALERTS_PART))

    def deliver(self, alert: Alert) -> str | None:
        """Send one message; returns why it was not accepted, None if it was. Apprise gives up on a
        server that is silent for 4 s."""
        try:
            if self._service is None:
                with _loading:
                    import apprise

                    target = apprise.Apprise.instantiate(self._url)
                    if target is None:
                        return f"{self.name} is not an address that Apprise supports"
                    self._service = apprise.Apprise()
                    self._service.add(target)
            kind = _TYPES.get(alert.level, "info")
            if self._service.notify(title=alert.title, body=alert.body, notify_type=kind):
                return None
        except Exception as error:  # noqa: BLE001 - a plugin's bug must not end the thread; it is reported
            missing = optional_deps.problem("alerts") if isinstance(error, ImportError) else None
            return missing or f"{self.name} failed with {type(error).__name__}: {error}"
        return f"{self.name} did not accept the message"


def send_test(settings: AlertSettings) -> Answer:
    """Send a test message to every configured target. The answer's value is the number of targets;
    if any did not accept the message, the answer gives the reasons."""
    words = "This is a test message from miner-guard. Alerts sent to this target reach you."
    alert = Alert("test", "info", words, title="miner-guard: test")
    start = time.monotonic()
    results: dict[str, str | None] = {}

    def deliver(target: Target) -> None:
        results[target.name] = target.deliver(alert)

    targets = [Target(n, url, lambda _event: None) for n, url in enumerate(settings.urls, 1)]
    for target in targets:
        results[target.name] = f"{target.name} did not respond within {_TEST_WITHIN_S:g} s"
    threads = [threading.Thread(target=deliver, args=(t,), daemon=True) for t in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, start + _TEST_WITHIN_S - time.monotonic()))
    reasons = "; ".join(reason for reason in results.values() if reason)
    return Answer(None if reasons else len(targets), reasons or None, time.monotonic() - start)


_GATHER_S = 3.0
_MAX_LINES = 8
_MAX_TITLE, _MAX_TOLD = 160, 60
"""Characters of a message's title, and of it on the console, where the events stand already."""


class AlertsMonitor(Monitor):
    """Sends alerts if `[alerts] urls` is set, and heartbeats if `heartbeat_url` is set.

    What follows one fault within `_GATHER_S` goes into one message. By then the status shows the
    fault too, so that the message says the same as every other surface. A stop of the miner is one
    message when it begins and one, with what it cost, when the miner trains again.
    """

    name = "alerts"
    order = 95

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        settings = context.config.alerts
        self._settings = settings
        self._policy = AlertPolicy(settings, context.clock)
        self._targets = [
            Target(number, url, self._report) for number, url in enumerate(settings.urls, 1)
        ]
        self._gathered: list[Alert] = []
        self._send_at = math.inf
        self._stopped = False
        """Whether a message about a stopped miner has been sent, and the miner does not train."""

        self._followed: list[str] = []
        """What has followed that message."""

        self._lasting_at: float | None = None
        """When a miner that trains again will have done so for long enough."""

        if settings.urls and (missing := optional_deps.problem("alerts")) is not None:
            context.emit(degraded(f"no alert will be delivered: {missing}"))
        if settings.heartbeat_url:
            every_s = context.config.health.snapshot_every_s
            context.jobs.every("heartbeat", every_s, self._heartbeat, first_after_s=5.0)

    def on_event(self, event: Event) -> Iterable[Event]:
        if event.name in BY_PROGRESS or event.name == "crash_loop":
            self._lasting_at = None
        if self._settings.urls:
            self._gather(self._policy.observe(event))
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Event]:
        now = self.context.clock.monotonic()
        if self._lasting_at is None:
            self._lasting_at = now + _LASTS_S
        elif now >= self._lasting_at:
            # A step proves it: the last ones of a miner that has exited may come late.
            self._lasting_at = None
            self._stopped = False
            self._gather(self._policy.progressed())
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        if now >= self._send_at:
            self._send()
        return ()

    def _gather(self, alerts: Iterator[Alert]) -> None:
        for alert in alerts:
            if self._stopped and alert.event in BY_PROGRESS and not alert.resolves:
                self._followed.append(alert.body)
                continue
            if self._gathered and self._gathered[0].resolves != alert.resolves:
                # A problem and its end are two messages, however short it was.
                self._send()
            if not self._gathered:
                self._send_at = self.context.clock.monotonic() + _GATHER_S
            self._gathered.append(alert)

    def _send(self, *, last: bool = False) -> None:
        """Send what has gathered as one message: the worst event leads, then the state as it is
        now and the next step. `last`: do not wait for a job."""
        alerts, self._gathered, self._send_at = self._gathered, [], math.inf
        if not alerts:
            return
        first = max(alerts, key=lambda alert: (LEVELS[alert.level], alert.event != "miner_exited"))
        lines = list(dict.fromkeys(alert.body for alert in (first, *alerts)))
        stop = any(alert.event in BY_PROGRESS for alert in alerts)
        if not first.resolves:
            if stop:
                self._stopped, self._followed = True, []
            self._put(first, subject(lines[0]), lines)
            return
        followed, self._followed = self._followed, []

        def put() -> None:
            card = latest(RunReader(self.context.state.db)) if stop and not last else None
            told = lines if card is None or card.over is None else [card.sentence]
            then = dict.fromkeys(f"then: {line}" for line in followed)
            self._put(first, f"RESOLVED {first.event}", [*told, *then])

        if last:
            put()
        else:
            # The card is read from the disk.
            self.context.jobs.once("the incident's card", put)

    def _put(self, first: Alert, cause: str, lines: Sequence[str]) -> None:
        # An event may quote the miner, a server or a library; the state is the guard's own.
        redactor, status = self.context.redactor, StatusDocument.from_json(self.context.status())
        now, (state, earning, step) = read_state(status), answers(status)
        again = ""
        if not first.resolves and step == NOTHING:
            # The state is well again, so that only the event says what to do.
            again = " again" if first.event in BY_PROGRESS and now.life == TRAINING else ""
            fix, row = lines[0].partition(" Fix: ")[2], rows().get(first.event)
            hint = f"{row.action if row else 'see why'} (more: `miner-guard explain {first.event}`)"
            step = f"so that it does not happen again: {fix}" if fix else hint
        shown = [line.partition(" Fix: ")[0] for line in lines[:_MAX_LINES]]
        if more := lines[_MAX_LINES:]:
            shown.append(f"and {counted(len(more), 'more line')}: `miner-guard logs`")
        place = str(self.context.state.root)
        shown = [public_around(place, line) for line in shown]
        told = [*shown, state, f"Earning: {earning}", f"Next: {step}"]
        title = f"{self.context.name}: {first_words(now)}{again}: {cause}"
        title = shortened(redactor.public(title), _MAX_TITLE)
        message = replace(first, title=title, body="\n".join(map(redactor.text, told)))
        for target in self._targets:
            target.put(message)

    def _report(self, event: Event) -> None:
        """Redact an event and log it. Called from the targets' threads."""
        text = self.context.redactor.text(event.text)
        fields = self.context.redactor.value(event.fields)
        self.context.emit(replace(event, text=text, fields=fields))

    def _heartbeat(self) -> None:
        status = StatusDocument.from_json(self.context.status())
        if problem(status) is not None:
            # The missing ping is the signal: the monitoring service alerts on its absence.
            return
        url = str(self._settings.heartbeat_url)
        if not url.startswith(("http://", "https://")):
            raise ValueError("the heartbeat URL must begin with http:// or https://")
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S):
                return
        except OSError as error:
            # Its text may hold the address, which is a secret.
            reason = str(getattr(error, "reason", None) or error)
            raise ConnectionError(self.context.redactor.text(reason)) from None

    def on_stop(self) -> Iterable[Event]:
        self._send(last=True)
        for target in self._targets:
            target.close()
        return ()

    def lingers(self) -> bool:
        return any(target.waiting for target in self._targets)

    def snapshot(self) -> Mapping[str, Any]:
        return {
            "targets": len(self._targets),
            "waiting": sum(target.waiting for target in self._targets),
            "dropped": sum(target.dropped for target in self._targets),
        }
