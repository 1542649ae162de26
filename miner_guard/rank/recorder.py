"""Records what happens in a rank: in the flight record and, if no supervisor is listening, on the
console. A datagram wakes the supervisor; the data itself is in the flight record.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miner_guard.rank import layout
from miner_guard.rank.environment import RankContext
from miner_guard.rank.flight import FlightWriter
from miner_guard.rank.journal import EventEntry, JournalEntry
from miner_guard.rank.layout import StepRecord, json_default
from miner_guard.record.events import Event, event
from miner_guard.system.once import Once
from miner_guard.system.sockets import address

if TYPE_CHECKING:
    from miner_guard.rank.console import Console

_NOBODY = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR})


def notification(rank: int) -> bytes:
    """The datagram that tells the supervisor to read the rank's flight record."""
    return b'{"bell": %d}' % rank


class Notifier:
    """Sends to one socket. `send` never blocks and never raises."""

    def __init__(self, path: Path | None) -> None:
        self.alone = path is None
        """Whether no supervisor is listening: there is no socket, or the last datagram found no
        listener."""

        self.dropped = 0
        """Number of undelivered datagrams: no process is listening, or the supervisor is too
        slow."""

        self._path = path
        self._socket: socket.socket | None = None
        if path is None:
            return
        with contextlib.suppress(OSError):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def notify(self, rank: int) -> bool:
        """Tell the supervisor to read the rank's flight record."""
        return self.send(notification(rank))

    def send(self, payload: bytes) -> bool:
        """Send one datagram. False if it was dropped."""
        if self._socket is None or self._path is None:
            self.alone = True
            self.dropped += 1
            return False
        try:
            with address(self._path) as name:
                self._socket.sendto(payload, socket.MSG_DONTWAIT, name)
        except OSError as error:
            # A supervisor that is stuck (EAGAIN) still exists, and will read the flight record
            # later.
            self.alone = error.errno in _NOBODY
            self.dropped += 1
            return False
        self.alone = False
        return True

    def answer(self, path: Path, work: Callable[[], None]) -> None:
        """Also receive at `path`: a thread waits for datagrams and runs `work` for each of them.
        Does nothing without a socket. Raises OSError."""
        receiver = self._socket
        if receiver is None:
            return
        path.unlink(missing_ok=True)
        with address(path) as name:
            receiver.bind(name)
        os.chmod(path, 0o600)

        def receive() -> None:
            while receiver.recv(16):
                work()

        threading.Thread(target=receive, name="miner-guard-requests", daemon=True).start()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self.alone = True


STARTING, RUNNING, CLOSED, FINISHED, ENDED, FAILED = layout.STATES

NOTIFY_EVERY_S = 0.05
"""Minimum interval between step notifications to the supervisor."""

_MAX_TROUBLES = 20
"""How many different failures the hook reports; it only counts the rest."""


class Recorder:
    """Records events in this rank and reports them to the supervisor. Thread-safe; never raises
    or blocks."""

    def __init__(self, place: RankContext, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.place = place
        self.monotonic = monotonic
        self.notifier = Notifier(place.state.socket if place.state is not None else None)
        self._console: Console | None = None
        self._forked = False
        # Reentrant, because a signal handler of the miner may close the guard in the middle of it.
        self._mutex = threading.RLock()
        # If the process has no standard output, descriptor 1 may be any file that the program has
        # opened.
        self._stdout = None if sys.__stdout__ is None else _target(1)
        self.error_count = 0
        """Number of failures inside the hook, including those not reported."""

        self._reported = Once(_MAX_TROUBLES)
        self._rung = -math.inf
        self.flight: FlightWriter | None = None
        self._open()
        if self.notifier.alone:
            # Now, because the program may close its standard output.
            self._open_console()

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
            self.flight.keep_copy(lambda: self.notifier.alone)
            if self.flight.unpublished is not None:
                self.report_error(
                    "flight",
                    f"the supervisor can't find the flight record for rank {place.rank} yet: "
                    f"{self.flight.unpublished}; retrying",
                )
        except (OSError, ValueError) as error:
            self.report_error(
                "flight",
                f"no flight record for rank {place.rank}: {error}; training continues without it",
            )
        self.show(STARTING)
        self.notifier.notify(place.rank)

    @property
    def supervised(self) -> bool:
        return self.flight is not None and not self.notifier.alone

    def show(self, state: str) -> None:
        """Write the state to the header, and clear the phase."""
        if self.flight is not None:
            self.flight.dropped(self.notifier.dropped)
            self.flight.show_state(state, self.monotonic())

    def step(self, record: StepRecord) -> None:
        if self.flight is not None:
            self.flight.append(record)
        if record.end - self._rung >= NOTIFY_EVERY_S:
            self._rung = record.end
            if not self.notifier.notify(self.place.rank) and self.flight is not None:
                self.flight.dropped(self.notifier.dropped)

    def journal(self, entry: JournalEntry | Mapping[str, Any], /) -> bool:
        """Append an entry that must not be lost. Returns False if the journal has no room or this
        rank has no flight record."""
        stored = False
        if self.flight is not None:
            document = entry.to_json() if isinstance(entry, JournalEntry) else entry
            stored = self.flight.journal({"t": self.monotonic(), **document})
        self.notifier.notify(self.place.rank)
        return stored

    def room(self) -> int:
        return 0 if self.flight is None else self.flight.room()

    def emit(self, event: Event, /) -> None:
        """Log an event: through the supervisor if there is one, else from this process."""
        entry = EventEntry(
            event=event.name,
            level=event.level,
            text=event.text,
            rank=self.place.rank if event.rank is None else event.rank,
            fields=dict(event.fields),
        )
        if not self.journal(entry) and not self.notifier.alone:
            # Without room or without a record, send it as a datagram, which may be lost.
            document = {k: v for k, v in entry.to_json().items() if k != "kind"}
            self.notifier.send(json.dumps(document, default=json_default).encode())
        if self.notifier.alone:
            self.say(event)

    def say(self, event: Event) -> None:
        if not self._forked:
            self._open_console().say(event)

    def _open_console(self) -> Console:
        """The console of this process. A supervised rank neither imports it nor opens the
        descriptor until it loses its supervisor."""
        from miner_guard.rank.console import Console

        with self._mutex:
            if self._console is None:
                descriptor = None
                if self._stdout is not None and _target(1) == self._stdout:
                    # Write to a duplicate of descriptor 1, because bittensor and others strip
                    # handlers from loggers and replace sys.stdout.
                    with contextlib.suppress(OSError):
                        descriptor = os.dup(1)
                self._console = Console(self.place.rank, descriptor)
            return self._console

    def report_error(self, where: str, what: str) -> None:
        """Report a failure inside the hook, once per `where`. The number of different reports is
        bounded."""
        self.error_count += 1
        if self._reported.first(where):
            self.emit(
                event(
                    "guard_degraded",
                    "warning",
                    f"GUARD DEGRADED: {what}",
                    rank=self.place.rank,
                    what=what,
                    where=where,
                )
            )

    def close(self, state: str) -> None:
        self.show(state)
        self.notifier.notify(self.place.rank)
        if self._console is not None:
            self._console.flush()

    def detach_after_fork(self) -> None:
        """Stop recording in a forked child, because the record belongs to the parent."""
        self.flight = None
        self.notifier.close()
        self._forked = True
        if self._console is not None:
            self._console.detach_after_fork()


def _target(fd: int) -> tuple[int, int] | None:
    """The file, pipe or terminal that a descriptor refers to."""
    try:
        stat = os.fstat(fd)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def describe(error: BaseException) -> str:
    """Describe an exception on one line, truncated to a maximum length."""
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
