"""Named phases of a step: how long each took, and which one the rank is in now."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol

from miner_guard.flight_recorder.layout import NAN, PHASES

_COLUMNS = {name: column for column, name in enumerate(PHASES)}
_COLUMNS["checkpoint"] = _COLUMNS["pause"]
_OTHER = _COLUMNS["other"]
_MONITOR = _COLUMNS["monitor"]
_MOST_NAMES = 256
"""Names that are remembered; a program that makes up new ones has the rest of them made afresh each time."""

_DEEPEST = 64
"""Open phases; more of them were entered by hand and forgotten, and each step would take longer."""


class Header(Protocol):
    """Where the current phase is shown."""

    def phase(self, name: bytes, since: float, heartbeat: float, allowance_s: float) -> None: ...


class Phases:
    """The open phases of the training thread and the seconds of the current step.

    Seconds are inclusive: a phase counts what is nested in it, once. Phases of another thread than the
    one that steps (a background upload) take no time of the step and are not shown.
    """

    def __init__(self, header: Header, monotonic: Callable[[], float], allowances: Mapping[str, float]) -> None:
        """`allowances`: how long a phase may last by the settings, seconds, by name."""
        self.header = header
        self._allowances = allowances
        self.monotonic = monotonic
        self.seconds = [0.0] * len(PHASES)
        """Per column of `layout.PHASES`, since the last `take`."""

        self.nested_in_monitor = 0.0
        """Seconds of the phases directly below `monitor`."""

        self.stack: list[Open] = []
        self.owner = threading.get_ident()
        self.live = True
        self.failed: Exception | None = None
        """The first error inside a phase; the phases go on."""

        self._known: dict[tuple[str, float | None], Phase] = {}

    def named(self, name: str, allowance_s: float | None = None) -> Phase:
        """The context manager of a phase; the same object each time, entered as often as wanted."""
        key = (name, allowance_s)
        phase = self._known.get(key)
        if phase is None:
            declared = NAN if allowance_s is None else float(allowance_s)
            longest = self._allowances.get(str(name), -math.inf) if allowance_s is None else declared
            phase = Phase(self, str(name), declared, longest)
            if len(self._known) < _MOST_NAMES:
                self._known[key] = phase
        return phase

    @property
    def current(self) -> Open | None:
        """The innermost open phase."""
        return self.stack[-1] if self.stack else None

    def shown(self, now: float) -> tuple[bytes, float, float]:
        """Name, since when and allowance of the innermost phase; an empty name between phases."""
        frame = self.current
        return (b"", now, NAN) if frame is None else (frame.phase.packed, frame.since, frame.allowance_s)

    def take(self, now: float) -> tuple[list[float], float]:
        """The seconds since the last call, and those nested in monitor; open phases are counted up to now."""
        for depth, frame in enumerate(self.stack):
            self._count(frame, depth, now)
            frame.counted_to = now
        seconds, nested = self.seconds, self.nested_in_monitor
        self.seconds, self.nested_in_monitor = [0.0] * len(PHASES), 0.0
        return seconds, nested

    def _count(self, frame: Open, depth: int, now: float) -> None:
        elapsed = now - frame.counted_to
        column = frame.phase.column
        if depth and any(outer.phase.column == column for outer in self.stack[:depth]):
            return
        self.seconds[column] += elapsed
        if depth and self.stack[depth - 1].phase.column == _MONITOR:
            self.nested_in_monitor += elapsed

    def enter(self, phase: Phase, now: float) -> None:
        if len(self.stack) >= _DEEPEST:
            raise OverflowError(f"{_DEEPEST} phases are open, {phase.name} is not followed: they are never left")
        frame = Open(phase, now, self.current)
        self.stack.append(frame)
        self.header.phase(phase.packed, now, now, frame.allowance_s)

    def leave(self, phase: Phase, now: float) -> None:
        if not any(frame.phase is phase for frame in self.stack):
            return
        while self.stack:
            frame = self.stack[-1]
            self._count(frame, len(self.stack) - 1, now)
            self.stack.pop()
            if frame.phase is phase:
                break
        outer = self.current
        if outer is None:
            self.header.phase(b"", now, now, NAN)
        else:
            self.header.phase(outer.phase.packed, outer.since, now, outer.allowance_s)


class Open:
    """A phase that was entered and not yet left."""

    __slots__ = ("allowance_s", "counted_to", "phase", "since", "until")

    def __init__(self, phase: Phase, now: float, outer: Open | None) -> None:
        self.phase = phase
        self.since = now
        self.counted_to = now
        self.until = now + phase.longest_s
        self.allowance_s = phase.allowance_s
        if outer is not None and outer.until > self.until:
            # A long phase stays long inside: a validation goes through data and forward phases of its own.
            self.until = outer.until
            self.allowance_s = outer.until - now


class Phase:
    """`with guard.phase("data"): …`. Entering and leaving never raise."""

    __slots__ = ("_phases", "allowance_s", "column", "longest_s", "name", "packed")

    def __init__(self, phases: Phases, name: str, allowance_s: float, longest_s: float) -> None:
        """`allowance_s`: as declared, else NaN; `longest_s`: that, else the settings' of this name, else -inf."""
        self._phases = phases
        self.name = name
        self.packed = name.encode("utf-8", "replace")[:24]
        self.column = _COLUMNS.get(name, _OTHER)
        self.allowance_s = allowance_s
        self.longest_s = longest_s

    def __enter__(self) -> Phase:
        phases = self._phases
        if phases.live and phases.owner == threading.get_ident():
            try:
                phases.enter(self, phases.monotonic())
            except Exception as error:  # noqa: BLE001 - the miner's step is sacred; the guard reports it at the next step
                phases.failed = phases.failed or error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        phases = self._phases
        if phases.live and phases.owner == threading.get_ident():
            try:
                phases.leave(self, phases.monotonic())
            except Exception as failure:  # noqa: BLE001 - as above
                phases.failed = phases.failed or failure
