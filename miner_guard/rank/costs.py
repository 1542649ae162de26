"""Adds up what monitoring costs in this rank, journals the totals periodically, and shows the guard
which monitoring operation is running now."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from threading import get_ident

from miner_guard.rank.journal import CostEntry
from miner_guard.rank.layout import JOURNAL_SIZE
from miner_guard.rank.phases import Phases
from miner_guard.rank.recorder import Recorder, describe

HOOK = "guard.hook"
"""The operation name for the hook's own work."""

_HOOK = (HOOK, True)

_FLUSH_EVERY_S = 10.0
_ROOM_LEFT = JOURNAL_SIZE // 2
"""Bytes of the journal reserved for decisions and uploads."""

_MAX_OPERATIONS = 64


class RankCosts:
    """This rank's costs, summed by operation and by whether training waited. The flight record
    shows the outermost operation that the training thread is inside, so that the guard does not
    take a long evaluation for a hang."""

    def __init__(self, recorder: Recorder, phases: Phases, monotonic: Callable[[], float]) -> None:
        self._recorder = recorder
        self._phases = phases
        self._monotonic = monotonic
        self._open: list[object] = []
        self._sums: dict[tuple[str, bool], tuple[float, int]] = {}
        self._flushed = -math.inf

    @contextlib.contextmanager
    def shown(self, operation: str) -> Iterator[None]:
        """Show `operation` while the `with` block runs. Does nothing on another thread, for which
        training does not wait."""
        entry: object | None = None
        if self._phases.owner == get_ident() and self._phases.live:
            entry = object()
            self._open.append(entry)
            if len(self._open) == 1:
                self._show(operation.encode("utf-8", "replace"))
        try:
            yield
        finally:
            if entry is not None and entry in self._open:
                del self._open[self._open.index(entry) :]
                if not self._open:
                    self._show(b"")

    def stepped(self, seconds: float, now: float) -> None:
        """Add the hook's own seconds of a step that ends `now`. Forget the open operations: a step
        has ended inside them, so training did not wait for them, or the program never left
        them."""
        if self._open:
            self._open.clear()
            self._show(b"")
        total, count = self._sums.get(_HOOK, (0.0, 0))
        self._sums[_HOOK] = (total + seconds, count + 1)
        if now - self._flushed >= _FLUSH_EVERY_S:
            self.flush()

    def _show(self, name: bytes) -> None:
        try:
            if self._recorder.flight is not None:
                self._recorder.flight.show_operation(name, self._monotonic())
        except Exception as error:  # noqa: BLE001 - the operation itself continues; reported as guard_degraded
            self._recorder.report_error("operation", f"guard.track: {describe(error)}")

    def add(self, operation: str, seconds: float, blocking: bool) -> None:
        """Add one run of an operation. Raises ValueError if `seconds` is negative or not finite."""
        if not 0.0 <= seconds < math.inf:
            raise ValueError(f"{seconds} s for {operation} is not a valid duration; ignored")
        key = (operation, blocking)
        if key not in self._sums and len(self._sums) >= _MAX_OPERATIONS:
            key = ("others", blocking)
        total, count = self._sums.get(key, (0.0, 0))
        self._sums[key] = (total + seconds, count + 1)
        if self._monotonic() - self._flushed >= _FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Journal the sums. Those that do not fit in the journal wait for the next flush."""
        self._flushed = self._monotonic()
        for key in list(self._sums):
            if self._recorder.room() <= _ROOM_LEFT:
                return
            operation, blocking = key
            # Another thread may flush concurrently.
            seconds, count = self._sums.pop(key, (0.0, 0))
            if not count:
                continue
            self._recorder.journal(
                CostEntry(operation=operation, seconds=seconds, blocking=blocking, count=count)
            )

    @contextlib.contextmanager
    def track(self, operation: str) -> Iterator[None]:
        """Time the `with` block as one run of an operation that training waits for."""
        started = self._monotonic()
        try:
            with self.shown(str(operation)):
                yield
        finally:
            try:
                self.add(str(operation), self._monotonic() - started, True)
            except Exception as error:  # noqa: BLE001 - a failure of the timing must not affect the timed code; reported as guard_degraded
                self._recorder.report_error(
                    "track", f"guard.track: {describe(error)}; training continues"
                )
