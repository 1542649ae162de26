"""Reads the ranks' flight records for the supervisor: delivers what is new since the last poll, and
acknowledges the entries it has delivered."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from miner_guard.rank import flight as flight_record
from miner_guard.rank.flight import BadFlight, FlightReader, Version, process_start
from miner_guard.rank.layout import Identity, Now, StepRecord
from miner_guard.record.events import Event, event
from miner_guard.state_dir import StateDir, set_aside
from miner_guard.system.processes import Process, alive

_MAX_STEPS_A_LOOK = 1024
_RECORD = re.compile(r"rank-\d+\.(?:bin|live)")

_PATIENCE = 2
"""Number of polls for which to hold back the other ranks' steps until the lead rank reports the
same step, because ranks finish a step milliseconds apart."""


class Reader(Protocol):
    """Receives the ranks' steps and journal entries."""

    def steps(self, rank: int, steps: Sequence[StepRecord]) -> None: ...

    def entry(self, rank: int, entry: Mapping[str, Any]) -> None: ...


@dataclass
class _Open:
    """One open flight record."""

    reader: FlightReader
    version: Version
    next_step: int = 0
    next_entry: int = 0
    total_steps: int = -1
    """`total_steps` of the last step that was delivered."""

    waited: int = 0
    """Polls during which this rank was ahead of the lead rank."""


class Flights:
    """All flight records from one run. Supervisor thread only."""

    def __init__(
        self,
        state: StateDir,
        run_id: str,
        report: Callable[[Event], None],
        copy: Callable[[Path, int], None] = flight_record.copy_now,
    ) -> None:
        """`copy(path, fd)` updates the on-disk copy at `path` of the record open as `fd`; it must
        not block on the disk."""
        self._state = state
        self._run_id = run_id
        self._report = report
        self._open: dict[int, _Open] = {}
        self._past: list[tuple[int, _Open]] = []
        """Records of ranks that the launcher replaced during this launch. The next poll reads them
        to the end and closes them."""

        self._not_before = 0
        self._left_alone: dict[Path, Version] = {}
        self._ended: set[tuple[int, int]] = set()
        """Processes of this launch, as (pid, start time), that the launcher has replaced."""

        self._copy = copy
        self._copied_at = -math.inf

    def leftovers(self, reader: Reader) -> None:
        """Deliver entries that an earlier run wrote but no guard has acknowledged, so that no
        decision or upload is lost."""
        for path in self._paths():
            flight = self._try(path)
            if flight is None:
                continue
            for number, entry in flight.entries(flight.acknowledged()):
                try:
                    reader.entry(flight.identity.rank, entry)
                finally:
                    # Acknowledge an entry even if processing it failed: otherwise it would come
                    # back and block the entries behind it.
                    flight.acknowledge(number + 1)
            flight.close()

    def launched(self, pid: int) -> None:
        """Start a new launch whose launcher is `pid`: ignore this run's records from earlier
        launches."""
        self._close_records()
        self._ended.clear()
        try:
            self._not_before = process_start(pid)
        except OSError:
            self._not_before = 0

    def progress(self) -> dict[str, list[int]]:
        """What has been delivered of each rank's steps, for `resume`."""
        return {
            str(rank): [*_who(each.reader), each.next_step] for rank, each in self._open.items()
        }

    def resume(self, progress: Mapping[str, Sequence[int]]) -> None:
        """Open the records of ranks that are already running, and skip the steps that another
        guard has delivered."""
        self._refresh_all()
        for rank, each in self._open.items():
            pid, start, next_step = progress.get(str(rank), (0, 0, 0))
            if _who(each.reader) == (pid, start):
                each.next_step = next_step

    def poll(self, reader: Reader) -> None:
        """Deliver what is new in all records. The lead (lowest) rank's record of a step comes
        before the other ranks'."""
        self._refresh_all()
        self._finish_past(reader)

        def hand_over(rank: int, current: _Open) -> None:
            ahead = self._hand_over(rank, current, reader, patient=current.waited < _PATIENCE)
            current.waited = current.waited + 1 if ahead else 0

        self._of_each(hand_over)
        self._keep_copies()

    def last_poll(self, reader: Reader) -> None:
        """Deliver everything that is left. No rank is writing anymore, so hold no steps back."""
        self._refresh_all()
        self._finish_past(reader)
        self._of_each(lambda rank, each: self._hand_over(rank, each, reader, patient=False))

    def _of_each(self, work: Callable[[int, _Open], object]) -> None:
        """Call `work` for every rank, then raise the first failure, so that one rank's bad record
        does not hide the others'."""
        failed: list[Exception] = []
        for rank in sorted(self._open):
            try:
                work(rank, self._open[rank])
            except Exception as error:  # noqa: BLE001 - raised below, after every rank has had its turn
                failed.append(error)
        if failed:
            raise failed[0]

    def _finish_past(self, reader: Reader) -> None:
        past, self._past = self._past, []
        for rank, each in past:
            try:
                self._hand_over(rank, each, reader, patient=False)
            finally:
                self._close_record(each)

    def look_at(self, rank: int, reader: Reader) -> None:
        """Deliver what is new in the lead rank's record, then in `rank`'s; open that record first
        if it is new."""
        if rank not in self._open:
            self._refresh_all()
        self._finish_past(reader)
        if rank not in self._open:
            return
        for each in sorted({min(self._open), rank}):
            self._hand_over(each, self._open[each], reader, patient=True)

    def _hand_over(self, rank: int, current: _Open, reader: Reader, *, patient: bool) -> bool:
        """Deliver a rank's new records; True if steps were held back because the lead rank is
        behind."""
        new = list(current.reader.steps(current.next_step))
        steps = new
        if patient and current is not (lead := self._open[min(self._open)]):
            steps = list(
                itertools.takewhile(lambda step: step.total_steps <= lead.total_steps, new)
            )
        if steps:
            current.next_step = steps[-1].number + 1
            current.total_steps = steps[-1].total_steps
        for start in range(0, len(steps), _MAX_STEPS_A_LOOK):
            reader.steps(rank, steps[start : start + _MAX_STEPS_A_LOOK])
        for number, entry in list(current.reader.entries(current.next_entry)):
            current.next_entry = number + 1
            try:
                reader.entry(rank, entry)
            finally:
                current.reader.acknowledge(number + 1)
        return len(steps) < len(new)

    def _refresh_all(self) -> None:
        for path in self._paths():
            self._refresh(path)

    def now(self) -> dict[int, Now]:
        """Headers by rank, for ranks that have written one."""
        headers = ((rank, current.reader.now()) for rank, current in sorted(self._open.items()))
        return {rank: now for rank, now in headers if now is not None}

    def identities(self) -> dict[int, Identity]:
        """Identities by rank."""
        return {rank: current.reader.identity for rank, current in sorted(self._open.items())}

    def all_in(self, states: Collection[str]) -> bool:
        """Return True if every rank on this host is present and in one of these states."""
        headers = self.now()
        identities = self.identities().values()
        local_ranks = {identity.local_rank for identity in identities}
        # If no launcher set the local world size, a missing highest local rank goes unnoticed.
        expected = max((identity.local_world_size for identity in identities), default=0)
        expected = expected or len(local_ranks)
        whole = len(headers) == len(self._open) and local_ranks == set(range(expected))
        return bool(headers) and whole and all(now.state in states for now in headers.values())

    def all_stepped(self) -> bool:
        """Return True if every rank that reported has finished at least one step."""
        headers = self.now()
        return bool(headers) and all(now.total_steps > 0 for now in headers.values())

    def ask_checkpoint(self) -> int:
        """Ask every rank to write a checkpoint at the end of its step; returns the number of ranks
        asked."""
        for current in self._open.values():
            current.reader.request_checkpoint()
        return len(self._open)

    def _paths(self) -> Iterator[Path]:
        try:
            names = os.listdir(self._state.flight)
        except OSError:
            return
        for stem in sorted({name.partition(".")[0] for name in names if _RECORD.fullmatch(name)}):
            yield self._state.flight / f"{stem}.bin"

    def _refresh(self, path: Path) -> None:
        version = flight_record.version(path)
        if version is None or self._left_alone.get(path) == version:
            return
        for each in self._open.values():
            copied = each.reader.live and each.reader.path == path and not version.live
            if copied or each.version == version:
                return
        flight = self._try(path)
        if flight is None:
            return
        identity = flight.identity
        who = (identity.pid, identity.process_start)
        current = self._open.get(identity.rank)
        same = current is not None and _who(current.reader) == who
        if (
            identity.run_id != self._run_id[:16]
            or identity.process_start < self._not_before
            or who in self._ended
        ):
            self._left_alone[path] = version
            flight.close()
            return
        # The file system may give a later file the inode number of a skipped one.
        self._left_alone.pop(path, None)
        if current is not None and same:
            current.reader.close()
            current.reader, current.version = flight, version
            return
        self._retire(identity)
        self._open[identity.rank] = _Open(flight, version, next_entry=flight.acknowledged())

    def _retire(self, successor: Identity) -> None:
        """Retire the records of the ranks that `successor` replaces. torchrun may give its workers
        new ranks at a new rendezvous."""
        for rank, older in list(self._open.items()):
            own = older.reader.identity
            # Ranks that no launcher started all have local rank 0, so a process that is still alive
            # has not been replaced.
            moved = own.local_rank == successor.local_rank and not alive(
                Process(own.pid, own.process_start)
            )
            if rank == successor.rank or moved:
                self._ended.add(_who(older.reader))
                self._past.append((rank, self._open.pop(rank)))

    def _try(self, path: Path) -> FlightReader | None:
        try:
            return FlightReader(path, acknowledge=True)
        except BadFlight as problem:
            self._damaged(path, str(problem))
        except OSError:
            return None
        return None

    def _damaged(self, path: Path, reason: str) -> None:
        try:
            aside = set_aside(path)
        except OSError:
            return
        self._report(
            event(
                "file_set_aside",
                "warning",
                f"FILE SET ASIDE: {path} was {reason}, now {aside}",
                path=str(path),
                reason=reason,
                aside=str(aside),
            )
        )

    def close(self) -> None:
        """Unmap all records, after a final copy of each."""
        self._close_records()

    def _close_records(self) -> None:
        for each in (*self._open.values(), *(past for _, past in self._past)):
            self._close_record(each)
        self._open.clear()
        self._past.clear()

    def _close_record(self, each: _Open) -> None:
        self._keep_copy(each)
        each.reader.close()

    def _keep_copies(self) -> None:
        now = time.monotonic()
        if now - self._copied_at >= flight_record.COPY_EVERY_S:
            self._copied_at = now
            for each in self._open.values():
                self._keep_copy(each)

    def _keep_copy(self, each: _Open) -> None:
        if each.reader.live:
            # If no descriptor is free, the next copy covers the same data.
            with contextlib.suppress(OSError):
                self._copy(each.reader.path, each.reader.fileno())


def _who(reader: FlightReader) -> tuple[int, int]:
    return reader.identity.pid, reader.identity.process_start
