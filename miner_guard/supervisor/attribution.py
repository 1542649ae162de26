"""Why a launch ended, for people and for the restart policy: the incident seen shortly before, else
the exit code."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from miner_guard.eventlog.catalog import Finding
from miner_guard.monitors.base import Exit
from miner_guard.supervisor.restart import Failure
from miner_guard.system import processes
from miner_guard.system.clock import Clock

_BLAME_S = 300.0
"""An incident longer before the end is not what it ended of."""


class RankStates(Protocol):
    """What the ranks wrote last of themselves."""

    def all_in(self, states: Collection[str]) -> bool:
        """Every rank is in one of these states, and none is missing."""
        ...

    def all_stepped(self) -> bool:
        """Every rank has finished a step."""
        ...


def ran_to_its_end(ranks: RankStates, objections: Sequence[str]) -> bool:
    """Whether a miner that exits with 0 and makes no claim has finished, by the evidence.

    Every rank stepped and left through the end of its program, no exception reached its top level,
    and nothing that it printed in the last minutes tells of an error: a loop that catches its
    exception, prints it and returns exits with 0 too.
    """
    return not objections and ranks.all_stepped() and ranks.all_in({"ended", "finished"})


class Attribution:
    """Of one launch after another."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._incident: Finding | None = None
        self._incident_at = 0.0

    def launched(self) -> None:
        """What was seen of the launch before no longer counts."""
        self._incident = None

    def hear(self, finding: Finding) -> None:
        """The latest incident counts: the part names roots only, and what was survived came
        before."""
        if finding.event == "incident":
            self._incident, self._incident_at = finding, self._clock.monotonic()
        elif (
            finding.event == "incident_overcome"
            and self._incident is not None
            and finding.fields["label"] == self._incident.fields["label"]
        ):
            self._incident = None

    def failure(self, end: Exit) -> Failure:
        """What the restart policy is told of an end that nobody asked for."""
        how = how_it_ended(end, "exit code")
        if self._incident is None or self._clock.monotonic() - self._incident_at > _BLAME_S:
            return Failure(how, end.runtime_s)
        fields = self._incident.fields
        label, kind = str(fields["label"]), str(fields.get("restart", "transient"))
        return Failure(f"{label}, {how}", end.runtime_s, kind, label, str(fields.get("fix") or ""))


def how_it_ended(end: Exit, code: str = "code") -> str:
    """`code` is what its exit code is called."""
    return (
        f"{code} {end.code}"
        if end.signal is None
        else f"signal {processes.signal_name(end.signal)}"
    )
