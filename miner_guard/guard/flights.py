"""Reads the ranks' records for the supervisor: delivers what is new since the last poll, and tells
each rank how much of its journal has been stored."""

from __future__ import annotations

import functools
import itertools
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miner_guard.guard.keeper_client import KeeperClient
from miner_guard.guard.loop import Loop
from miner_guard.guard.wire import Caller, WireListener
from miner_guard.rank import layout
from miner_guard.rank.layout import (
    ENDED_STATES,
    FlightReader,
    FlightWriter,
    Identity,
    Now,
    process_start,
)
from miner_guard.record.events import Event, degraded
from miner_guard.system.processes import Process, alive
from miner_guard.watch.runner import MonitorRunner

_PATIENCE = 2
"""Number of polls for which to hold back the other ranks' steps until the lead rank reports the
same step, because ranks finish a step milliseconds apart."""


@dataclass
class _Open:
    """One rank's record."""

    reader: FlightReader
    name: str = ""
    """Its name in the store; empty for the guard's own record of a miner that is known only by its
    output."""

    connection: socket.socket | None = None
    """None if the rank is gone."""

    total_steps: int = -1
    """`total_steps` of the last step that was delivered."""

    waited: int = 0
    """Polls during which this rank was ahead of the lead rank."""

    steps: int = field(init=False)
    """Steps that were delivered; `reader.steps_read` counts those that are stored."""

    def __post_init__(self) -> None:
        self.steps = self.reader.steps_read


_SLICE = 64
"""Steps of a rank to deliver at once. A guard that has fallen behind, or follows one that was
killed, finds thousands: without a heartbeat in between, the keeper would take it for hung."""


class Flights:
    """The records of all ranks of one launch. Supervisor thread only, except `identities`,
    `headers` and `ask_collectives`."""

    def __init__(
        self,
        wire: WireListener,
        receiver: MonitorRunner,
        loop: Loop,
        *,
        keeper: KeeperClient,
        report: Callable[[Event], None],
    ) -> None:
        self._wire, self._receiver, self._loop = wire, receiver, loop
        self._keeper, self._report = keeper, report
        self._open: dict[int, _Open] = {}
        self._past: list[tuple[int, _Open]] = []
        """Records of ranks that the launcher replaced during this launch. The next poll reads them
        to the end and closes them."""

        self._replaced: set[str] = set()
        """The names of those records. Their processes may still be alive."""

        self._launch = -1
        self._behind = False
        """Whether the loop will call `_catch_up`."""

        self._beside = False
        """Whether another process of this launch has claimed a rank that is taken."""

        wire.on_caller = self._called

    def launched(self, launch: int) -> None:
        """Begin launch number `launch`, counting from 0: forget the ranks of earlier ones."""
        self.close()
        self._replaced.clear()
        self._launch, self._beside = launch, False

    def adopt(self, held: Mapping[str, tuple[Sequence[int], Any]]) -> None:
        """Continue with the ranks that another guard of this keeper has been reading."""
        for name, (fds, note) in held.items():
            if len(fds) != 2:
                continue
            connection = socket.socket(fileno=fds[0])
            if note["layout"] == layout.VERSION:
                connection.setblocking(False)
                self._called(Caller(Identity.from_dict(note), connection, fds[1]))
            else:
                # A guard of another version read it: the rank connects again, which is reported.
                connection.close()
                os.close(fds[1])
                self._keeper.drop(name)

    def _called(self, caller: Caller) -> None:
        """A rank has connected, perhaps again."""
        name, identity = caller.record(), caller.identity
        try:
            current = self._open.get(identity.rank)
            if current is not None and current.name == name:
                self._hang_up(current)
            elif name in self._replaced or self._trains_beside(current, identity):
                caller.connection.close()
                return
            elif identity.launch != self._launch:
                caller.connection.close()
                # An earlier guard may have left it in the store.
                self._keeper.drop(name)
                return
            else:
                current = _Open(FlightReader(caller.memory, identity), name)
                self._retire(identity)
                self._open[identity.rank] = current
            descriptors = [caller.connection.fileno(), caller.memory]
            note = {**identity.as_dict(), "layout": layout.VERSION}
            self._keeper.hold(name, descriptors, note)
        except OSError as error:
            caller.connection.close()
            self._report(degraded(f"the record of rank {identity.rank} can't be read: {error}"))
            return
        finally:
            os.close(caller.memory)
        current.connection = caller.connection
        self._loop.watch(caller.connection.fileno(), functools.partial(self._heard, current))

    def _trains_beside(self, current: _Open | None, identity: Identity) -> bool:
        """Whether a process claims to be a rank that another one is still training as. The workers
        of a `multiprocessing.Pool` do; reported once for each launch."""
        if current is None or current.connection is None:
            return False
        first, now = current.reader.identity, current.reader.now()
        same = (first.pid, first.process_start) == (identity.pid, identity.process_start)
        if same or now is None or now.state in ENDED_STATES:
            return False
        if first.world_size != identity.world_size:
            return False
        recorded, other = first.pid, identity.pid
        if now.total_steps == 0:
            recorded, other = other, recorded
        if not self._beside:
            self._beside = True
            self._report(
                degraded(
                    f"several processes train as rank {identity.rank}; only the steps of pid "
                    f"{recorded} are recorded, not those of pid {other}. Give each its "
                    "RANK and WORLD_SIZE, or a guard of its own"
                )
            )
        return now.total_steps > 0

    def _heard(self, current: _Open) -> None:
        """A rank has added to its record, or is gone."""
        assert current.connection is not None
        try:
            data = current.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up(current)
        rank = current.reader.identity.rank
        if self._open.get(rank) is not current:
            return
        self._finish_past()
        for each in sorted({min(self._open), rank}):
            self._deliver(each, self._open[each], patient=True)

    def _hang_up(self, current: _Open) -> None:
        if current.connection is not None:
            self._loop.unwatch(current.connection.fileno())
            current.connection.close()
            current.connection = None

    def _retire(self, successor: Identity) -> None:
        """Retire the records of the ranks that `successor` replaces. torchrun may give its workers
        new ranks at a new rendezvous."""
        for rank, older in list(self._open.items()):
            identity = older.reader.identity
            # Ranks that no launcher started all have local rank 0, so a process that is still alive
            # has not been replaced.
            moved = identity.local_rank == successor.local_rank and not alive(
                Process(identity.pid, identity.process_start)
            )
            if rank == successor.rank or moved:
                self._replaced.add(older.name)
                self._past.append((rank, self._open.pop(rank)))

    def open_writer(self, pid: int) -> FlightWriter:
        """Open a record of rank 0 that this guard writes, for a miner of which only the output is
        known. Raises OSError."""
        identity = Identity(pid, 0, 0, 1, process_start(pid), self._launch)
        writer = FlightWriter()
        self._retire(identity)
        self._open[0] = _Open(FlightReader(writer.memory, identity))
        return writer

    def poll(self, *, last: bool = False) -> None:
        """Deliver what is new in all records. The lead (lowest) rank's record of a step comes
        before the other ranks'; with `last`, no rank is writing anymore, so no step is held back.
        Raises the first failure after every rank has had its turn."""
        self._wire.poll()
        self._finish_past()
        failed: list[Exception] = []
        for rank in sorted(self._open):
            current = self._open[rank]
            try:
                if last:
                    self._deliver_rest(rank, current)
                    continue
                ahead = self._deliver(rank, current, patient=current.waited < _PATIENCE)
                current.waited = current.waited + 1 if ahead else 0
            except Exception as error:  # noqa: BLE001 - raised below
                failed.append(error)
        if failed:
            raise failed[0]

    def _finish_past(self) -> None:
        past, self._past = self._past, []
        for rank, each in past:
            try:
                self._deliver_rest(rank, each)
            finally:
                self._close(each)

    def _deliver_rest(self, rank: int, current: _Open) -> None:
        """Deliver all of a record to which nothing is added any more."""
        before = -1
        while before < current.steps:
            before = current.steps
            self._deliver(rank, current, patient=False)
            self._keeper.tell("beat")

    def _catch_up(self) -> None:
        self._behind = False
        self.poll()

    def _deliver(self, rank: int, current: _Open, *, patient: bool) -> bool:
        """Deliver a rank's new records; True if steps were held back because the lead rank is
        behind."""
        reader = current.reader
        new = list(itertools.islice(reader.steps(current.steps), _SLICE))
        if len(new) == _SLICE and not self._behind:
            self._behind = True
            self._loop.after(0.0, self._catch_up)
        steps = new
        if patient and current is not (lead := self._open[min(self._open)]):
            steps = list(
                itertools.takewhile(lambda step: step.total_steps <= lead.total_steps, new)
            )
        if steps:
            current.steps = steps[-1].number + 1
            current.total_steps = steps[-1].total_steps
            self._receiver.steps(rank, steps)
        for end, entry in list(reader.entries(reader.bytes_read)):
            try:
                self._receiver.entry(rank, entry)
            finally:
                # Even if processing it failed: otherwise it would come back and block the entries
                # behind it.
                reader.bytes_read = end
        return len(steps) < len(new)

    def commit(self) -> None:
        """Everything that was delivered is stored: should this guard be killed, the next one
        continues here."""
        for each in self._open.values():
            each.reader.steps_read = each.steps

    def headers(self) -> dict[int, Now]:
        """Headers by rank, for ranks that have written one."""
        headers = {rank: each.reader.now() for rank, each in sorted(self._open.items())}
        return {rank: now for rank, now in headers.items() if now is not None}

    def identities(self) -> dict[int, Identity]:
        """Identities by rank."""
        return {rank: each.reader.identity for rank, each in sorted(self._open.items())}

    def ask_collectives(self, rank: int) -> bool:
        """Ask a rank to write its last collectives to its file; False if it is gone."""
        current = self._open.get(rank)
        if current is None or current.connection is None:
            return False
        try:
            return current.connection.send(b"?", socket.MSG_NOSIGNAL) == 1
        except OSError:
            return False

    def all_in(self, states: Collection[str]) -> bool:
        """Return True if every rank on this host is present and in one of these states."""
        headers = self.headers()
        identities = self.identities().values()
        local_ranks = {identity.local_rank for identity in identities}
        # If no launcher set the local world size, a missing highest local rank goes unnoticed.
        expected = max((identity.local_world_size for identity in identities), default=0)
        expected = expected or len(local_ranks)
        whole = len(headers) == len(self._open) and local_ranks == set(range(expected))
        return (
            bool(headers)
            and whole
            and all(
                now.state in states or ("ended" in states and self._dismissed(rank))
                for rank, now in headers.items()
            )
        )

    def _dismissed(self, rank: int) -> bool:
        """Whether this rank's parent has ended it, as is usual for it."""
        each = self._open[rank]
        return each.connection is None and each.reader.identity.daemonic == 1

    def all_stepped(self) -> bool:
        """Return True if every rank that reported has finished at least one step."""
        headers = self.headers()
        return bool(headers) and all(now.total_steps > 0 for now in headers.values())

    def ask_checkpoint(self) -> int:
        """Ask every rank to write a checkpoint at the end of its step; returns the number of ranks
        asked."""
        for current in self._open.values():
            current.reader.request_checkpoint()
        return len(self._open)

    def has_saved(self) -> bool | None:
        """Whether this node's first rank, which speaks for all, has saved the checkpoint that it
        was asked for; None if it has ended, or never looks for requests."""
        lead = self._open.get(min(self._open, default=0))
        now = None if lead is None else lead.reader.now()
        if lead is None or now is None or now.state != "running":
            return None
        return lead.reader.has_saved()

    def close(self) -> None:
        """Close all records."""
        for each in (*self._open.values(), *(past for _, past in self._past)):
            self._close(each)
        self._open.clear()
        self._past.clear()

    def _close(self, each: _Open) -> None:
        self._hang_up(each)
        each.reader.close()
        if each.name:
            self._keeper.drop(each.name)
