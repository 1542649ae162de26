"""Whether a miner that failed is started again, and when: pure, by cause.

The causes come from the incident knowledge (`miner_guard/incidents/*.toml`, field `restart`). A
cause that a restart cannot fix is not tried again and again; what may pass is, with growing waits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from miner_guard.config import RestartSettings
from miner_guard.eventlog.catalog import counted


@dataclass(frozen=True)
class RestartRule:
    """How one kind of cause is treated."""

    tries: int | None
    """Restarts in a row for this kind; None: as many as `max_restarts` allows."""

    advice: str
    """What a person should do when the guard gives up."""

    outside: bool = False
    """A service somewhere else must come back first: the waits begin with `outage_backoff_s`."""


RULES = {
    "transient": RestartRule(None, "look at the incidents and at the miner's last lines above"),
    "outage": RestartRule(None, "see whether the service answers from this machine", outside=True),
    "once": RestartRule(1, "a restart does not mend it"),
    "hardware": RestartRule(
        1, "a restart of the miner can't bring it back: restart the container, then the host"
    ),
    "config": RestartRule(1, "a person must change something first; a restart can't mend it"),
}
"""By the value of an incident's field `restart`; `never` and unknown ones are treated as transient.

All with a number count by label: the same label again without a healthy stretch between ends it.
`config` too has one try, because the cause is read from log lines: one line misread must not end a
miner for the night.
"""


@dataclass(frozen=True)
class Failure:
    """One end that nobody asked for."""

    cause: str
    """For people."""

    runtime_s: float
    kind: str = "transient"
    """A key of RULES."""

    label: str = ""
    """The incident's, empty where no incident says why."""

    fix: str = ""
    """What the incident knowledge tells a person to do."""


@dataclass(frozen=True)
class Again:
    """Start again."""

    wait_s: float
    attempt: int
    """Of `max_restarts`, since the last healthy stretch."""


@dataclass(frozen=True)
class GiveUp:
    """Restarting stops."""

    why: str


class RestartPolicy:
    """Counts failures since the last healthy stretch."""

    def __init__(
        self, settings: RestartSettings, chance: Callable[[], float] = random.random
    ) -> None:
        """`chance` gives numbers in [0, 1) for the jitter."""
        self._settings = settings
        self._chance = chance
        self._failures = 0
        self._by_label: dict[str, int] = {}
        self._times: list[float] = []

    @property
    def failures(self) -> int:
        """Failures since the last healthy stretch."""
        return self._failures

    def healthy(self) -> None:
        """The miner trained for a whole healthy stretch: what was before no longer counts."""
        self._failures = 0
        self._by_label.clear()
        self._times.clear()

    def failed(self, failure: Failure) -> Again | GiveUp:
        """The miner ended though nobody asked for it, or it hung."""
        cause = failure.cause
        rule = RULES.get(failure.kind, RULES["transient"])
        self._times.append(failure.runtime_s)
        if self._settings.max_restarts == 0:
            return GiveUp(f"{cause}; restarts are switched off (max_restarts 0)")
        tried = self._by_label.get(failure.label, 0)
        if rule.tries is not None and tried >= rule.tries:
            again = " again after a restart" if tried else ""
            return GiveUp(f"{cause}{again}; {rule.advice}{failure.fix and f'. {failure.fix}'}")
        if self._failures >= self._settings.max_restarts:
            ran = ", ".join(f"{seconds:.0f}s" for seconds in self._times[-6:])
            tried_in_vain = counted(self._failures, "restart")
            return GiveUp(
                f"{cause}; {tried_in_vain} did not help (it ran {ran}); "
                f"{failure.fix or rule.advice}"
            )
        self._by_label[failure.label] = tried + 1
        self._failures += 1
        first = self._settings.outage_backoff_s if rule.outside else self._settings.backoff_s
        return Again(self._wait_s(first), self._failures)

    def _wait_s(self, first: float) -> float:
        """min(first · 2^(n-1), longest) · (1 + jitter · chance), n counted from 1."""
        growth = 2.0 ** min(self._failures - 1, 60)
        wait = min(first * growth, self._settings.backoff_max_s)
        return wait * (1 + self._settings.jitter_ratio * self._chance())
