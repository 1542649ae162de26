"""Parts: one concern beside the miner each; the supervisor feeds them and logs what they find.

A part glues a pure room (detectors, incidents, uploads, health) to the running supervisor. The
supervisor calls every monitor from its own thread. A part must not block: what takes time goes
through `Context.jobs`. A part that raises is reported once (`guard_degraded`) and the others
continue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from miner_guard.config import Config
from miner_guard.eventlog.catalog import Finding
from miner_guard.eventlog.redact import Redactor
from miner_guard.flight_recorder.journal import JournalEntry
from miner_guard.flight_recorder.records import Now, StepRecord
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import Clock


@dataclass(frozen=True)
class Launch:
    """One start of the miner within a run of the guard."""

    command: Sequence[str]
    pid: int
    attempt: int
    """0 for the first start, then one more for each restart."""

    started: float
    """Monotonic."""


@dataclass(frozen=True)
class Exit:
    """How one launch ended."""

    code: int
    """As a shell reports it: 128 + n for signal n."""

    signal: int | None
    asked: bool
    """The guard asked for it: a stop, a restart by `ctl`, the end of a hang."""

    finished: bool
    """Every rank said so, or code 0 and `[miner] finite`, or code 0 and all the evidence of
    `attribution.ran_to_its_end`."""

    runtime_s: float


class Jobs(Protocol):
    """Work on a schedule, in threads of its own, never piling up."""

    def every(
        self,
        name: str,
        seconds: float,
        work: Callable[[], None],
        *,
        first_after_s: float | None = None,
    ) -> None:
        """Run `work` every `seconds`; what it raises is logged as `sampler_failed`."""
        ...

    def once(self, name: str, work: Callable[[], None]) -> None:
        """Run `work` as soon as a thread is free."""
        ...


class SupervisorControl(Protocol):
    """What a part may ask of the supervisor. Safe from any thread."""

    def restart(self, cause: str) -> None:
        """Stop the miner and start it again by the restart policy."""
        ...

    def finish(self, cause: str) -> None:
        """Stop what is left of a miner whose ranks have finished, and end the guard as after any
        finish."""
        ...

    def use_command(self, command: Sequence[str]) -> None:
        """The miner's command from the next launch on."""
        ...

    def relaunch(self, cause: str) -> None:
        """Stop the miner and start it again at once, not counted as a failure."""
        ...

    def stop(self, cause: str, exit_code: int) -> None:
        """Stop the miner and end the guard."""
        ...


@dataclass(frozen=True)
class Context:
    """What the supervisor hands to each part."""

    config: Config
    state: StateDir
    clock: Clock
    run_id: str
    emit: Callable[[Finding], None]
    """Log a finding; safe from any thread."""

    jobs: Jobs
    control: SupervisorControl
    status: Callable[[], Mapping[str, Any]]
    """The latest status document: every monitor's `snapshot` under its name."""

    redactor: Redactor
    """Knows the secrets of the guard and of the miner; what is logged through `emit` passes it
    anyhow."""

    write_row: Callable[[str, Sequence[Any]], None] | None = None
    """Takes rows for the ledger (SQL and its values) and never waits for the disk; None: anyone who
    has rows writes them."""


class Monitor:
    """Does nothing; parts override what concerns them. Times are monotonic seconds."""

    name = "part"

    words: frozenset[bytes] | None = None
    """The monitor is shown lines that hold one of these and is spared nearly all others. Each is a
    `line_templates.template`. None: it wants all output; empty: none."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def on_launch(self, launch: Launch) -> Iterable[Finding]:
        """The miner was started."""
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Finding]:
        """New step records of one rank, oldest first."""
        return ()

    def on_entry(self, rank: int, entry: JournalEntry) -> Iterable[Finding]:
        """A new journal entry of one rank; acknowledged after all monitors have returned."""
        return ()

    def on_lines(self, lines: Sequence[bytes]) -> Iterable[Finding]:
        """Whole lines of the miner's output, oldest first, without their line ends; see `words`.

        None is empty or longer than `line_router.MAX_LINE_BYTES`; each redraw of a progress bar
        (carriage return) is a line of its own.
        """
        return ()

    def on_output(self, chunk: bytes) -> Iterable[Finding]:
        """Raw output of the miner, up to 80 KiB, cut anywhere; see `words`."""
        return ()

    def on_finding(self, finding: Finding) -> Iterable[Finding]:
        """Something another monitor found."""
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Finding]:
        """About once a second, with each rank's flight header."""
        return ()

    def objection(self) -> str | None:
        """Why a miner that ended with code 0 has not finished; asked before `on_exit`, after its
        last output. None: nothing speaks against it."""
        return None

    def on_exit(self, end: Exit) -> Iterable[Finding]:
        """The miner ended; its last steps, entries and output were handed over before."""
        return ()

    def on_stop(self) -> Iterable[Finding]:
        """The guard ends."""
        return ()

    def lingers(self) -> bool:
        """After `on_stop`: something of this part should still go out before the process ends."""
        return False

    def snapshot(self) -> Mapping[str, Any]:
        """What status.json holds under this part's name. Unknown is null."""
        return {}
