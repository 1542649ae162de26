"""Where a rank's record goes: the flight record, the bell and, while nobody listens, its own
log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.flight_recorder import layout
from miner_guard.flight_recorder.journal import FindingEntry, JournalEntry
from miner_guard.flight_recorder.records import StepRecord
from miner_guard.flight_recorder.writer import FlightWriter
from miner_guard.rank.environment import RankContext
from miner_guard.rank.notify import Notifier
from miner_guard.rank.standalone_log import StandaloneLog

STARTING, RUNNING, CLOSED, FINISHED, ENDED, FAILED = layout.STATES

NOTIFY_EVERY_S = 0.05
"""The least time between two notifications of the supervisor about steps."""

_MAX_TROUBLES = 20
"""Different troubles that are reported; the rest are counted."""


class Recorder:
    """Keeps and announces what happens in this rank. Safe from any thread of it; nothing here
    raises or waits."""

    def __init__(self, place: RankContext, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.place = place
        self.monotonic = monotonic
        self.bell = Notifier(place.state.socket if place.state is not None else None)
        self.own_log = StandaloneLog(place.rank, place.run_id, place.state)
        self.troubles = 0
        """Everything that went wrong in the hook, said or not."""

        self._said: set[str] = set()
        self._rung = -math.inf
        self.flight: FlightWriter | None = None
        self._open()

    def _open(self) -> None:
        place = self.place
        if place.state is None:
            return
        try:
            self.flight = FlightWriter(
                place.state.flight_of(place.rank),
                rank=place.rank,
                local_rank=place.local_rank,
                world_size=place.world_size,
                run_id=place.run_id,
                local_world_size=place.local_world_size,
            )
            self.flight.keep_copy(lambda: self.bell.alone)
            if self.flight.unpublished is not None:
                self.trouble(
                    "flight",
                    f"the supervisor can't find the flight record of rank {place.rank} yet: "
                    f"{self.flight.unpublished}; it is shown again until it can",
                )
        except (OSError, ValueError) as error:
            self.trouble(
                "flight",
                f"no flight record of rank {place.rank}: {error}; training goes on without it",
            )
        self.show(STARTING)
        self.bell.ring(place.rank)

    @property
    def supervised(self) -> bool:
        """A supervisor reads the journal."""
        return self.flight is not None and not self.bell.alone

    def show(self, state: str) -> None:
        """Put the state into the header, outside any phase."""
        if self.flight is not None:
            self.flight.dropped(self.bell.dropped)
            self.flight.show_state(state, self.monotonic())

    def step(self, record: StepRecord) -> None:
        """Append a step record, and tell the supervisor of it at most every 50 ms."""
        if self.flight is not None:
            self.flight.append(record)
        if record.end - self._rung >= NOTIFY_EVERY_S:
            self.ring(record.end)

    def ring(self, now: float) -> None:
        """Tell the supervisor that there are steps to read."""
        self._rung = now
        if not self.bell.ring(self.place.rank) and self.flight is not None:
            self.flight.dropped(self.bell.dropped)

    def journal(self, entry: JournalEntry | Mapping[str, Any], /) -> bool:
        """Append an entry that must not be lost. False where there is no room or no flight
        record."""
        stored = False
        if self.flight is not None:
            document = entry.to_json() if isinstance(entry, JournalEntry) else entry
            stored = self.flight.journal({"t": self.monotonic(), **document})
        self.bell.ring(self.place.rank)
        return stored

    def room(self) -> int:
        """Journal entries that still fit; 0 without a flight record."""
        return 0 if self.flight is None else self.flight.room()

    def emit(self, finding: Finding, /) -> None:
        """Log a finding: through the supervisor where there is one, else here."""
        entry = FindingEntry(
            event=finding.event,
            level=finding.level,
            rank=self.place.rank if finding.rank is None else finding.rank,
            fields=dict(finding.fields),
        )
        if not self.journal(entry) and not self.bell.alone:
            self.bell.event({k: v for k, v in entry.to_json().items() if k != "kind"})
        if self.bell.alone:
            self.own_log.say(finding)

    def trouble(self, where: str, what: str) -> None:
        """Say once that something of the guard does not work; a bounded number of different
        ones."""
        self.troubles += 1
        if where in self._said or len(self._said) >= _MAX_TROUBLES:
            return
        self._said.add(where)
        self.emit(make_finding("guard_degraded", rank=self.place.rank, what=what, where=where))

    def close(self, state: str) -> None:
        """The last entry of the header. The file and the socket stay open until the process
        ends."""
        self.show(state)
        self.bell.ring(self.place.rank)
        if self.bell.alone:
            self.own_log.flush()

    def detach_after_fork(self) -> None:
        """In a forked child: the record is the parent's, so write nothing more."""
        self.flight = None
        self.bell.close()
        self.own_log.detach_after_fork()


def describe(error: BaseException) -> str:
    """One line about an exception."""
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
