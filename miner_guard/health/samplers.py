"""Samplers: each reads in its own thread with a deadline, so that a hung one does not delay the
others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.system.clock import Clock

Read = Callable[[], Mapping[str, Any]]


class Unreadable(Exception):
    """Raised by a sampler that can say why it has no value."""


@dataclass(frozen=True)
class Reading:
    """A sampler's last answer. If the last attempt failed, `value` is None and `reason` says
    why."""

    value: Mapping[str, Any] | None
    reason: str | None
    at: float
    """Monotonic time of the answer, or of the timeout."""

    seconds: float


NEVER = Reading(None, "not read yet", float("-inf"), 0.0)


@dataclass
class _Attempt:
    started: float
    done: threading.Event = field(default_factory=threading.Event)
    value: Mapping[str, Any] | None = None
    reason: str | None = None
    ended: float = 0.0


class Samplers:
    """A set of named samplers. One thread at a time may call `sample`; any may call `reading`."""

    def __init__(self, clock: Clock, timeout_s: float, reads: Mapping[str, Read]) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._reads = dict(reads)
        self._running: dict[str, _Attempt] = {}
        self._readings: dict[str, Reading] = dict.fromkeys(self._reads, NEVER)
        self._bad: set[str] = set()

    def reading(self, name: str) -> Reading:
        """One sampler's last answer."""
        return self._readings[name]

    def readings(self) -> dict[str, Reading]:
        """Each sampler's last answer."""
        return dict(self._readings)

    def sample(self) -> list[Finding]:
        """Start all samplers and wait for their answers or the deadline; returns new failures and
        recoveries.

        Skips a sampler that has not returned from an earlier call, so at most one thread per
        sampler hangs.
        """
        for name in self._reads:
            if name not in self._running:
                self._start(name)
        deadline = self._clock.monotonic() + self._timeout_s
        for attempt in list(self._running.values()):
            attempt.done.wait(max(0.0, deadline - self._clock.monotonic()))
        findings: list[Finding] = []
        for name in self._reads:
            findings += self._collect(name)
        return findings

    def _start(self, name: str) -> None:
        attempt = self._running[name] = _Attempt(self._clock.monotonic())

        def work() -> None:
            try:
                attempt.value = self._reads[name]()
            except Unreadable as error:
                attempt.reason = str(error)
            except Exception as error:  # noqa: BLE001 - whatever a sampler raises is reported as its reason
                attempt.reason = f"{type(error).__name__}: {error}"
            attempt.ended = self._clock.monotonic()
            attempt.done.set()

        threading.Thread(target=work, name=f"sampler-{name}", daemon=True).start()

    def _collect(self, name: str) -> list[Finding]:
        attempt, now = self._running[name], self._clock.monotonic()
        if attempt.done.is_set():
            del self._running[name]
            reading = Reading(
                attempt.value, attempt.reason, attempt.ended, attempt.ended - attempt.started
            )
        else:
            waited = now - attempt.started
            reading = Reading(None, f"no answer within {self._timeout_s:g} s", now, waited)
        self._readings[name] = reading
        if reading.reason is not None and name not in self._bad:
            self._bad.add(name)
            return [make_finding("sampler_failed", sampler=name, reason=reading.reason)]
        if reading.reason is None and name in self._bad:
            self._bad.discard(name)
            return [make_finding("sampler_recovered", sampler=name)]
        return []
