"""Records what happens in a rank: in the record that it shares with the guard and, if no guard is
listening, on the console.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from miner_guard.rank import layout
from miner_guard.rank.environment import RankContext, loaded_module
from miner_guard.rank.journal import EventEntry, JournalEntry
from miner_guard.rank.layout import FlightWriter, Identity, process_start
from miner_guard.rank.wire import Wire
from miner_guard.record.events import Event, degraded, event
from miner_guard.system.clock import Once

if TYPE_CHECKING:
    from miner_guard.rank.console import Console

STARTING, RUNNING, CLOSED, FINISHED, ENDED, FAILED = layout.STATES

RING_EVERY_S = 0.05
"""Minimum interval between the steps that the guard is told of at once."""

_MAX_TROUBLES = 20
"""How many different failures the hook reports; it only counts the rest."""


class Recorder:
    """Records events in this rank and reports them to the guard. Thread-safe; never raises or
    blocks."""

    def __init__(self, place: RankContext, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.place = place
        self.monotonic = monotonic
        self.wire: Wire | None = None
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
        if self.alone:
            # Now, because the program may close its standard output.
            self._open_console()

    def _open(self) -> None:
        place = self.place
        if not place.wire:
            return
        try:
            self.flight = flight = FlightWriter()
            hello = {**_identity(place).as_dict(), "layout": layout.VERSION}
            path = None if place.state is None else place.state.socket
            self.wire = Wire(place.wire, path, hello, flight.memory)
        except (OSError, AttributeError) as error:
            self.report_error(
                "flight",
                f"no shared memory for the record of rank {place.rank}: {error}; its steps are not "
                "recorded, and training continues",
            )
        self.show(STARTING)

    @property
    def alone(self) -> bool:
        """Whether no guard is listening."""
        return self.wire is None or self.wire.alone

    @property
    def supervised(self) -> bool:
        return self.flight is not None and not self.alone

    def ring(self) -> None:
        """Tell the guard to read the record."""
        if self.wire is not None:
            self.wire.ring()

    def show(self, state: str) -> None:
        """Write the state to the header, and clear the phase."""
        if self.flight is not None:
            self.flight.show_state(state, self.monotonic())
        self.ring()

    def step(self, values: tuple[float, ...], end: float) -> None:
        """Record a step, `StepRecord.packed`, that ended at `end`."""
        if self.flight is not None:
            self.flight.append(values)
        if end - self._rung >= RING_EVERY_S:
            self._rung = end
            self.ring()

    def journal(self, entry: JournalEntry | Mapping[str, Any], /) -> bool:
        """Append an entry that must not be lost. Returns False if the journal has no room or this
        rank has no record."""
        if self.flight is None:
            return False
        document = entry.to_json() if isinstance(entry, JournalEntry) else entry
        stored = self.flight.journal({"t": self.monotonic(), **document})
        self.ring()
        return stored

    def room(self) -> int:
        """The journal's free bytes."""
        return 0 if self.flight is None else self.flight.room()

    def emit(self, event: Event, /) -> None:
        """Log an event: through the guard if there is one, else from this process."""
        self.journal(
            EventEntry(
                event=event.name,
                level=event.level,
                text=event.text,
                rank=self.place.rank if event.rank is None else event.rank,
                fields=dict(event.fields),
            )
        )
        if self.alone:
            self.say(event)

    def say(self, event: Event) -> None:
        if not self._forked:
            self._open_console().say(event)

    def stepped_in_fork(self) -> None:
        """Report, once, that a forked child trains too, because nothing else would tell."""
        if self._forked and self._console is None:
            from miner_guard.rank.console import Console

            self._console = Console(self.place.rank, 2)
            self._console.say(
                degraded(
                    f"process {os.getpid()} was forked from rank {self.place.rank} and trains too; "
                    "its steps are not recorded. Fork before the first step, and give each "
                    "process its RANK and WORLD_SIZE"
                )
            )

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

    def detach_after_fork(self) -> None:
        """Stop recording in a forked child, because the record belongs to the parent."""
        self.flight = None
        if self.wire is not None:
            self.wire.close()
        self._forked, self._console = True, None


def _identity(place: RankContext) -> Identity:
    start = 0
    with contextlib.suppress(OSError):
        start = process_start()
    processes = loaded_module("multiprocessing.process")
    return Identity(
        pid=os.getpid(),
        rank=place.rank,
        local_rank=place.local_rank,
        world_size=place.world_size,
        process_start=start,
        launch=place.settings.launch,
        local_world_size=place.local_world_size,
        daemonic=int(processes is not None and processes.current_process().daemon),
        generation=place.generation,
    )


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
