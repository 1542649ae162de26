"""Decides why a launch ended: a recent incident if there is one, otherwise its exit code. Operators
see the cause, and the restart policy acts on it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from miner_guard.eventlog.catalog import Finding
from miner_guard.guard.restart import Failure
from miner_guard.system import processes
from miner_guard.system.clock import Clock
from miner_guard.watch.base import Exit

_BLAME_S = 300.0
"""Ignore incidents older than this; they did not cause the exit."""


class RankStates(Protocol):
    """The ranks' latest reported states."""

    def all_in(self, states: Collection[str]) -> bool:
        """Return True if every rank is present and in one of these states."""
        ...

    def all_stepped(self) -> bool:
        """Return True if every rank has finished a step."""
        ...


def ran_to_its_end(ranks: RankStates, objections: Sequence[str]) -> bool:
    """Return True if a miner that exited with 0 finished its work, even though it never reported
    that.

    The work is finished if every rank completed a step and reached the end of its program, no
    exception reached the top level, and the last few minutes of output show no error. The output
    matters because a training loop that catches an exception, prints it and returns also exits
    with 0.
    """
    return not objections and ranks.all_stepped() and ranks.all_in({"ended", "finished"})


class Attribution:
    """Finds the cause of each exit. One instance covers all launches of a run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._incident: Finding | None = None
        self._incident_at = 0.0

    def launched(self) -> None:
        """Forget the previous launch's incident."""
        self._incident = None

    def hear(self, finding: Finding) -> None:
        """Remember the latest incident until training recovers from it. The incidents
        monitor reports only root causes, and training survived all earlier ones."""
        if finding.event == "incident":
            self._incident, self._incident_at = finding, self._clock.monotonic()
        elif (
            finding.event == "incident_overcome"
            and self._incident is not None
            and finding.fields["label"] == self._incident.fields["label"]
        ):
            self._incident = None

    def failure(self, end: Exit) -> Failure:
        """The failure to pass to the restart policy for an unrequested exit."""
        how = how_it_ended(end, "exit code")
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
