"""What a watcher is: the events it receives, what the guard hands it, and its section of the
status.

The supervisor's thread calls all watchers, so a watcher must not block: slow work goes through
`Context.jobs`. One that raises is reported once (`guard_degraded`) and the others continue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from miner_guard.config import Config
from miner_guard.rank.journal import JournalEntry
from miner_guard.rank.layout import FlightWriter, Identity, Now, StepRecord
from miner_guard.record.events import Event
from miner_guard.record.redaction import Redactor
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import Clock


@dataclass(frozen=True)
class Launch:
    """One start of the miner during a guard run."""

    command: Sequence[str]
    pid: int
    attempt: int
    """0 for the first start, plus 1 for each restart."""

    started: float
    """Monotonic seconds."""


@dataclass(frozen=True)
class Exit:
    """How one launch ended."""

    code: int
    """As reported by a shell: 128 + n for signal n."""

    signal: int | None
    asked: bool
    """Whether the guard requested the exit: to stop, to restart for `ctl`, or to end a hang."""

    finished: bool
    """Whether the miner finished its work: every rank reported that it finished, or the exit code
    is 0 and `[miner] finite` is set or, with `attach = "auto"`, nothing says otherwise."""

    runtime_s: float


class Jobs(Protocol):
    """Scheduled work in separate threads; runs of one job never overlap."""

    def every(
        self,
        name: str,
        seconds: float,
        work: Callable[[], None],
        *,
        first_after_s: float | None = None,
    ) -> None:
        """Run `work` every `seconds`; an exception is logged as `guard_degraded`."""
        ...

    def once(self, name: str, work: Callable[[], None]) -> None:
        """Run `work` as soon as a thread is free."""
        ...


class SupervisorControl(Protocol):
    """Requests that a monitor may send to the supervisor. Safe from any thread."""

    def restart(self, cause: str) -> None:
        """Stop the miner and restart it under the restart policy."""
        ...

    def finish(self, cause: str) -> None:
        """Stop the remaining processes of a miner whose ranks have finished. The guard then exits
        with its code for a finished miner."""
        ...

    def use_command(self, command: Sequence[str]) -> None:
        """Use this command from the next launch on."""
        ...

    def relaunch(self, cause: str) -> None:
        """Stop the miner and restart it immediately, without counting a failure."""
        ...

    def stop(self, cause: str, exit_code: int) -> None:
        """Stop the miner and end the guard."""
        ...


class Records(Protocol):
    """The ranks' records in this launch. Safe from any thread, except `open_writer`."""

    def headers(self) -> Mapping[int, Now]:
        """Headers by rank, for ranks that have written one."""
        ...

    def identities(self) -> Mapping[int, Identity]:
        """Identities by rank."""
        ...

    def ask_collectives(self, rank: int) -> bool:
        """Ask a rank to write its last collectives to its file; False if it is gone."""
        ...

    def open_writer(self, pid: int) -> FlightWriter:
        """Open a record of rank 0 that this guard writes, for a miner of which only the output is
        known. Raises OSError."""
        ...


@dataclass(frozen=True)
class Context:
    """The services and data that the supervisor passes to each monitor."""

    config: Config
    state: StateDir
    clock: Clock
    run_id: str
    emit: Callable[[Event], None]
    """Log an event; safe from any thread."""

    jobs: Jobs
    control: SupervisorControl
    status: Callable[[], Mapping[str, Any]]
    """The latest status document: each monitor's `snapshot`, keyed by the monitor's name."""

    records: Records
    redactor: Redactor
    """Knows the secrets of the guard and of the miner; `emit` applies it to every event."""

    name: str
    """The miner's, for people."""

    write_row: Callable[[str, Sequence[Any]], None]
    """Queues a row for run.db (SQL and values) without waiting for the disk."""


Events = Iterable[Event]
"""A monitor's response to a delivery: events to log, oldest first."""


class Monitor:
    """Base class with no-op methods; monitors override those they need. Times are monotonic
    seconds."""

    name = "monitor"
    """The section of the status."""

    order = 50
    """Where the guard calls it among the watchers, lowest first."""

    words: frozenset[bytes] | None = None
    """A filter, in lower case: the monitor receives the lines, or the blocks of lines, that contain
    one of these words in any case. None: all output; empty: none. May change at any time; words
    that are new count from the next launch."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def on_launch(self, launch: Launch) -> Events:
        """The miner has started."""
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Events:
        """New step records from one rank, oldest first."""
        return ()

    def on_entry(self, rank: int, entry: JournalEntry) -> Events:
        """A new journal entry from one rank. Acknowledged after all monitors have returned."""
        return ()

    def on_lines(self, lines: Sequence[bytes]) -> Events:
        """Whole lines of the miner's output, oldest first, without line endings; see `words`.

        Lines are never empty or longer than `line_router.MAX_LINE_BYTES`; each redraw of a progress
        bar (carriage return) counts as a line.
        """
        return ()

    def on_output(self, chunk: bytes) -> Events:
        """Raw output of the miner, up to 272 KiB, split at arbitrary positions; see `words`."""
        return ()

    def on_event(self, event: Event) -> Events:
        """Another monitor's event."""
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Events:
        """Called about once a second, with each rank's flight header."""
        return ()

    def objection(self) -> str | None:
        """Return why a miner that exited with code 0 does not count as finished, or None to raise
        no objection. Called after the last output and before `on_exit`."""
        return None

    def on_exit(self, end: Exit) -> Events:
        """The miner exited; its last steps, entries and output have been delivered."""
        return ()

    def on_stop(self) -> Events:
        """The guard is about to exit."""
        return ()

    def lingers(self) -> bool:
        """Return True while this monitor has something to send before the process exits. Called
        after `on_stop`."""
        return False

    def finish(self) -> None:
        """The guard's last event is written; return within seconds."""

    def snapshot(self) -> Mapping[str, Any]:
        """This monitor's section of the present state. Unknown values are null."""
        return {}
