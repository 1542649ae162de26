"""Shows on the terminal's last line what a slow command is doing, once it has run for a second."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType

_AFTER_S = 1.0
"""Delay before the line appears: most commands end within a second."""

_EVERY_S = 0.25
_CLEAR = "\r\x1b[K"


class Working:
    """Shows the task, its progress and the elapsed seconds on one line of standard error, and
    clears the line at the end. Writes nothing to a pipe or a dumb terminal. Use as a context
    manager."""

    def __init__(self, what: str, total: int | None = None) -> None:
        """`total`: the amount of work, in the unit that `advance` counts."""
        self._what, self._total, self._done = what, total, 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._start = time.monotonic()

    def advance(self, amount: int) -> None:
        """Count `amount` as done."""
        self._done += amount

    def line(self, seconds: float) -> str:
        """The line to print, such as `reading the log: 42%, 3 s`."""
        share = f": {min(100, 100 * self._done // self._total)}%" if self._total else ""
        return f"{self._what}{share}, {seconds:.0f} s"

    def __enter__(self) -> Working:
        if sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb"):
            self._thread = threading.Thread(target=self._show, daemon=True, name="progress")
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _show(self) -> None:
        if self._ended.wait(_AFTER_S):
            return
        while not self._ended.wait(_EVERY_S):
            sys.stderr.write(_CLEAR + self.line(time.monotonic() - self._start))
            sys.stderr.flush()
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()
