"""Measures how long each named phase of a step took, and shows which phase the rank is in now."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from threading import get_ident
from types import TracebackType
from typing import Protocol

from miner_guard.rank import layout
from miner_guard.rank.layout import NAN
from miner_guard.record.events import PHASES

_COLUMNS = {name: column for column, name in enumerate(PHASES)}
_COLUMNS["checkpoint"] = _COLUMNS["pause"]
"""Maps each phase to the column of `events.PHASES` that its time is added to. All other phases
count as `other`."""

_MONITOR, _OTHER = _COLUMNS["monitor"], _COLUMNS["other"]

_FLAGS = {
    **dict.fromkeys(("inference", "val_loss", "example_loss", "monitor"), layout.FLAG_EVAL),
    **dict.fromkeys(("upload", "allreduce", "load_state", "pause"), layout.FLAG_SYNC),
}
"""Maps each column's phase to the flag for a step that spent time in it."""

_MAX_NAMES = 256
"""How many phase names to cache. Beyond that, the hook creates a new phase object every time
it meets an uncached name."""

_MAX_OPEN = 64
"""Limit on open phases. A program exceeds it only if it enters phases by hand and forgets to leave
them; without the limit, each step would then take longer than the last."""


class Header(Protocol):
    def show_phase(
        self, name: bytes, since: float, heartbeat: float, allowance_s: float
    ) -> None: ...


class Phases:
    """The open phases of the training thread and the seconds of the current step.

    A phase's seconds include those of the phases nested in it. Phases on other threads, such as a
    background upload, neither count towards the step nor show in the header.
    """

    def __init__(
        self, header: Header | None, monotonic: Callable[[], float], allowances: Mapping[str, float]
    ) -> None:
        """`allowances`: how long a phase may last according to the settings, in seconds by name."""
        self.header = header
        self.monotonic = monotonic
        self._allowances = allowances
        self.cached: dict[tuple[str, float | None], Phase] = {}
        """Phases by name and declared allowance."""

        self.started = monotonic()
        """Monotonic time at which the current step began."""

        self.count = 0
        """Number of steps this process has taken."""

        self.seconds = [0.0] * len(PHASES)
        """Seconds of the current step in each of `events.PHASES`."""

        self.flags = 0
        """Flags for a step that spent time in these phases."""

        self.nested_in_monitor = 0.0
        """Seconds spent in phases nested directly in `monitor`."""

        self.stack: list[tuple[Phase, float, float, float]] = []
        """The open phases, outermost first: when each was entered, until when it may last, and how
        long."""

        self.owner = get_ident()
        self.live = True
        self.failed: Exception | None = None
        """The hook's first error while entering or leaving a phase since the last step. Phases keep
        working."""

    def named(self, name: str, allowance_s: float | None = None) -> Phase:
        """The context manager for a phase. Reusable; each call returns the same object."""
        key = (name, allowance_s)
        phase = self.cached.get(key)
        if phase is None:
            declared = NAN if allowance_s is None else float(allowance_s)
            longest = (
                self._allowances.get(str(name), -math.inf) if allowance_s is None else declared
            )
            phase = Phase(self, str(name), declared, longest)
            if len(self.cached) < _MAX_NAMES:
                self.cached[key] = phase
        return phase

    def end_step(self, now: float) -> tuple[float, list[float], float, int]:
        """Begin the next step. Return when the one that ends began, its seconds in each phase and
        those nested in `monitor`, and the flags of its phases. Open phases count until `now`."""
        for depth in range(len(self.stack)):
            self.account(depth, now)
        ended = self.started, self.seconds, self.nested_in_monitor, self.flags
        self.started, self.count = now, self.count + 1
        self.seconds, self.nested_in_monitor, self.flags = [0.0] * len(PHASES), 0.0, 0
        return ended

    def account(self, depth: int, now: float) -> None:
        """Add the time that the open phase at `depth` has taken of this step, up to `now`."""
        phase, since, _, _ = self.stack[depth]
        elapsed = now - (since if since > self.started else self.started)
        if depth:
            if any(outer.column == phase.column for outer, *_ in self.stack[:depth]):
                return
            if self.stack[depth - 1][0].column == _MONITOR:
                self.nested_in_monitor += elapsed
        self.seconds[phase.column] += elapsed
        if elapsed:
            self.flags |= phase.flag


class Phase:
    """The context manager of `with guard.phase("data"): …`. Entering and leaving never raises."""

    __slots__ = ("_packed", "_phases", "allowance_s", "column", "flag", "longest_s", "name")

    def __init__(self, phases: Phases, name: str, allowance_s: float, longest_s: float) -> None:
        """`allowance_s`: the declared allowance, or NaN. `longest_s`: the declared allowance,
        otherwise the settings' value for this name, otherwise -inf."""
        self._phases = phases
        self._packed = name.encode("utf-8", "replace")[:24]
        """As the header shows it."""

        self.name = name
        self.column = _COLUMNS.get(name, _OTHER)
        self.flag = _FLAGS.get(PHASES[self.column], 0)
        self.allowance_s = allowance_s
        self.longest_s = longest_s

    def __enter__(self) -> Phase:
        phases = self._phases
        if phases.owner == get_ident() and phases.live:
            try:
                now, stack = phases.monotonic(), phases.stack
                until, allowance_s = now + self.longest_s, self.allowance_s
                if stack:
                    if len(stack) >= _MAX_OPEN:
                        raise OverflowError(
                            f"{_MAX_OPEN} phases are open (the limit); {self.name} is not counted"
                        )
                    if stack[-1][2] > until:
                        # A nested phase inherits a longer deadline from the outer one: a
                        # validation, for example, has its own data and forward phases.
                        until = stack[-1][2]
                        allowance_s = until - now
                stack.append((self, now, until, allowance_s))
                if phases.header is not None:
                    phases.header.show_phase(self._packed, now, now, allowance_s)
            except Exception as error:  # noqa: BLE001 - the miner's step is sacred; the guard reports it at the next step
                phases.failed = phases.failed or error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        phases = self._phases
        if phases.owner == get_ident() and phases.live:
            try:
                now, stack = phases.monotonic(), phases.stack
                if stack and (stack[-1][0] is self or any(each is self for each, *_ in stack)):
                    while True:
                        # Leave the phases that are still open inside it too.
                        phases.account(len(stack) - 1, now)
                        if stack.pop()[0] is self:
                            break
                if phases.header is not None:
                    if stack:
                        outer, since, _, allowance_s = stack[-1]
                        phases.header.show_phase(outer._packed, since, now, allowance_s)
                    else:
                        phases.header.show_phase(b"", now, now, NAN)
            except Exception as failure:  # noqa: BLE001 - as above
                phases.failed = phases.failed or failure
