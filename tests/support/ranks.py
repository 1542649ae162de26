"""The guard's end of the wire, without a guard: it keeps every record that a rank hands over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest

from miner_guard.guard.loop import Loop
from miner_guard.guard.wire import Caller, WireListener
from miner_guard.rank.layout import FlightReader, FlightWriter, Identity, Now, StepRecord
from miner_guard.rank.wire import WIRE


class Unwatched:
    """Stands in for the guard's loop and its keeper: nothing is watched or held."""

    def watch(self, fd: int, call: Callable[[], None]) -> None: ...
    def unwatch(self, fd: int) -> None: ...
    def hold(self, name: str, fds: Sequence[int], note: Any = None) -> None: ...
    def drop(self, name: str) -> None: ...


class Ranks:
    """Ranks that have connected. Reads what they wrote when a test asks, even if they are gone."""

    def __init__(self) -> None:
        idle = Unwatched()
        self.wire = WireListener(cast(Loop, idle), idle, lambda event: pytest.fail(event.text))
        self.wire.on_caller = self._called
        self.env = {WIRE: self.wire.address}
        """What a rank needs in its environment."""

        self.callers: list[Caller] = []
        """Every connection, oldest first."""

    def _called(self, caller: Caller) -> None:
        self.callers.append(caller)

    def reader(self, rank: int = 0) -> FlightReader:
        """The rank's latest record. Raises LookupError if it has none."""
        self.wire.poll()
        for caller in reversed(self.callers):
            if caller.identity.rank == rank:
                return FlightReader(caller.memory, caller.identity)
        raise LookupError(f"rank {rank} has not connected")

    @property
    def connected(self) -> list[int]:
        """The ranks that have connected."""
        self.wire.poll()
        return sorted({caller.identity.rank for caller in self.callers})

    def steps(self, rank: int = 0) -> list[StepRecord]:
        return list(self.reader(rank).steps())

    def now(self, rank: int = 0) -> Now:
        now = self.reader(rank).now()
        assert now is not None
        return now

    def entries(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        """The journal's entries of one kind."""
        reader = self.reader(rank)
        return [e for _, e in reader.entries(reader.bytes_read) if e["kind"] == kind]

    def decisions(self) -> list[dict[str, Any]]:
        """The gate's decisions."""
        return [entry["decision"] for entry in self.entries("decision")]

    def messages(self, rank: int = 0) -> list[str]:
        """What the hook reports as degraded."""
        found = self.entries("event", rank)
        return [e["fields"]["what"] for e in found if e["event"] == "guard_degraded"]

    def hang_up(self) -> None:
        """End like a guard that dies together with its keeper."""
        self.wire.close()
        for caller in self.callers:
            caller.connection.close()

    __del__ = hang_up


@contextmanager
def listening() -> Iterator[Ranks]:
    """Ranks may connect during the block."""
    ranks = Ranks()
    try:
        yield ranks
    finally:
        ranks.hang_up()


class OwnRecords:
    """Stands in for the guard's records: those of a miner that is known only by its output."""

    def __init__(self) -> None:
        self.opened: list[FlightReader] = []

    @property
    def reader(self) -> FlightReader:
        """The latest record."""
        return self.opened[-1]

    def open_writer(self, pid: int) -> FlightWriter:
        writer = FlightWriter()
        self.opened.append(FlightReader(writer.memory, Identity(pid, 0, 0, 1, 1)))
        return writer

    def headers(self) -> dict[int, Now]:
        return {}

    def identities(self) -> dict[int, Identity]:
        return {}

    def ask_collectives(self, rank: int) -> bool:
        return False
