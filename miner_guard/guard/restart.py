"""Decides why a launch ended (a recent incident if there is one, otherwise its exit code), and
whether and when to restart the miner, depending on that cause.

The causes come from the incident patterns (the `restart` field in `miner_guard/incidents/*.toml`).
Causes that a restart cannot fix get few attempts; transient ones are retried with growing backoff.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miner_guard.config import RestartSettings
from miner_guard.record.events import Event
from miner_guard.record.words import counted
from miner_guard.system import processes
from miner_guard.system.clock import Clock
from miner_guard.watch.base import Exit

OUTAGE_BACKOFF_S = 20.0
"""Wait before the first restart after a network, storage or chain outage. With the default
settings, the waits add up to ten minutes before the guard declares a crash loop."""

BACKOFF_MAX_S = 300.0
"""Longest wait before a restart."""

JITTER_RATIO = 0.1
"""Random share added to each wait, so that many miners do not restart at the same moment."""

HEALTHY_S = 600.0
"""A launch that has trained for this long resets the count of restarts."""


@dataclass(frozen=True)
class RestartRule:
    """The restart rule for one kind of cause."""

    tries: int | None
    """Consecutive restarts for this kind; None: up to `max_restarts`."""

    advice: str
    """Advice for the operator when the guard gives up."""

    outside: bool = False
    """Whether a remote service must recover first; if so, the backoff starts at
    `OUTAGE_BACKOFF_S`."""


RULES = {
    "transient": RestartRule(None, "check the incidents and the miner's last lines above"),
    "outage": RestartRule(
        None, "check whether the service is reachable from this machine", outside=True
    ),
    "once": RestartRule(1, "a restart does not fix it"),
    "hardware": RestartRule(
        1, "restarting the miner can't fix the hardware: restart the container, then the host"
    ),
    "config": RestartRule(1, "a restart cannot fix it; something has to be changed first"),
}
"""Rules by the value of an incident's `restart` field; `never` and unknown values count as
transient.

`tries` counts restarts per label: the guard gives up when the same label recurs more often than
that without a healthy stretch in between. Even `config` gets one restart, because the cause is read
from log lines: one misread line must not keep a miner down all night.
"""


@dataclass(frozen=True)
class Failure:
    """One unrequested exit or hang."""

    cause: str
    """A human-readable description of the cause."""

    runtime_s: float
    kind: str = "transient"
    """A key of RULES."""

    label: str = ""
    """The incident's label; empty without an incident."""

    fix: str = ""
    """What the operator can do about it, according to the incident patterns."""


@dataclass(frozen=True)
class Again:
    """Restart the miner after a wait."""

    wait_s: float
    attempt: int
    """The number of this attempt since the last healthy stretch, out of `max_restarts`."""


@dataclass(frozen=True)
class GiveUp:
    """Stop restarting."""

    why: str


class RestartPolicy:
    """Counts failures since the last healthy stretch."""

    def __init__(
        self, settings: RestartSettings, chance: Callable[[], float] = random.random
    ) -> None:
        """`chance` returns numbers in [0, 1) for the jitter."""
        self._settings = settings
        self._chance = chance
        self._failures = 0
        self._by_label: dict[str, int] = {}
        self._times: list[float] = []

    @property
    def failures(self) -> int:
        """Failures since the last healthy stretch."""
        return self._failures

    def restore(self, failures: int) -> None:
        """Continue with the count of a guard that died."""
        self._failures = failures

    def healthy(self) -> None:
        """Forget earlier failures, because the miner completed a healthy stretch of training."""
        self._failures = 0
        self._by_label.clear()
        self._times.clear()

    def failed(self, failure: Failure) -> Again | GiveUp:
        """Decide whether to restart after an unrequested exit or a hang."""
        cause = failure.cause
        rule = RULES.get(failure.kind, RULES["transient"])
        self._times.append(failure.runtime_s)
        if self._settings.max_restarts == 0:
            return GiveUp(f"{cause}; restarts are off ([restart] max_restarts = 0)")
        tried = self._by_label.get(failure.label, 0)
        if rule.tries is not None and tried >= rule.tries:
            again = " again after a restart" if tried else ""
            return GiveUp(f"{cause}{again}; {rule.advice}{failure.fix and f'. Fix: {failure.fix}'}")
        if self._failures >= self._settings.max_restarts:
            ran = ", ".join(f"{seconds:.0f}s" for seconds in self._times[-6:])
            tried_in_vain = counted(self._failures, "restart")
            return GiveUp(
                f"{cause}; {tried_in_vain} did not help (its runs lasted {ran})"
                + (f". Fix: {failure.fix}" if failure.fix else f"; {rule.advice}")
            )
        self._by_label[failure.label] = tried + 1
        self._failures += 1
        first = OUTAGE_BACKOFF_S if rule.outside else self._settings.backoff_s
        return Again(self._wait_s(first), self._failures)

    def _wait_s(self, first: float) -> float:
        """Seconds to wait before restart n, counted from 1: min(first · 2^(n-1), longest) · (1 +
        jitter · chance)."""
        growth = 2.0 ** min(self._failures - 1, 60)
        wait = min(first * growth, BACKOFF_MAX_S)
        return wait * (1 + JITTER_RATIO * self._chance())


_BLAME_S = 300.0
"""Ignore incidents older than this; they did not cause the exit."""


class Attribution:
    """Finds the cause of each exit. One instance covers all launches of a run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._incident: Event | None = None
        self._incident_at = 0.0
        self._gpu_faults: dict[Any, str] = {}
        """GPUs that have failed, by the guard's own readings, and how."""

    def launched(self) -> None:
        """Forget the previous launch's incident."""
        self._incident = None

    def hear(self, event: Event) -> None:
        """Remember the latest incident until training recovers from it. The incidents
        monitor reports only root causes, and training survived all earlier ones."""
        if event.name == "gpu_fault":
            self._gpu_faults.pop(event.fields.get("gpu"), None)
            if event.level == "critical":
                self._gpu_faults[event.fields.get("gpu")] = event.text
        if event.name != "incident":
            return
        if event.level != "info":
            self._incident, self._incident_at = event, self._clock.monotonic()
        elif self._incident and event.fields["label"] == self._incident.fields["label"]:
            self._incident = None

    def failure(self, end: Exit) -> Failure:
        """The failure to pass to the restart policy for an unrequested exit."""
        how = how_it_ended(end, "exit code")
        if self._gpu_faults:
            # Whatever the ranks say, and they say it differently after a restart.
            fault = next(iter(self._gpu_faults.values()))
            cause = f"gpu_hardware ({fault}), {how}"
            return Failure(cause, end.runtime_s, "hardware", "gpu_hardware")
        if self._incident is None or self._clock.monotonic() - self._incident_at > _BLAME_S:
            return Failure(how, end.runtime_s)
        fields = self._incident.fields
        label, kind = str(fields["label"]), str(fields.get("restart", "transient"))
        return Failure(f"{label}, {how}", end.runtime_s, kind, label, str(fields.get("fix") or ""))


def how_it_ended(end: Exit, code: str = "code") -> str:
    """Describe the exit: "signal SIGKILL", or `code` followed by the exit code."""
    return (
        f"{code} {end.code}"
        if end.signal is None
        else f"signal {processes.signal_name(end.signal)}"
    )
