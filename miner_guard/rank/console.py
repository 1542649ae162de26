"""Prints a rank's events while no guard is there to log them.

A thread writes the lines, so that a full pipe never stalls a step. What overflows its queue is
counted, and the count is printed.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time

from miner_guard.record.events import Event, degraded
from miner_guard.record.lines import console_line
from miner_guard.record.redaction import Redactor
from miner_guard.record.words import counted
from miner_guard.system.clock import iso_utc

_MAX_QUEUE = 1000
_FLUSH_S = 1.0
"""How long an exiting process waits for its last lines to be written."""


class Console:
    def __init__(self, rank: int, descriptor: int | None) -> None:
        """`descriptor`: where to print, or None."""
        self._rank = rank
        self._descriptor = descriptor
        self._redactor = Redactor.from_environment(os.environ)
        # A reentrant queue, because a signal handler of the miner may log in the middle of a step.
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._queued = self._written = 0
        self._thread: threading.Thread | None = None
        self._dropped = 0
        self._why = "too many lines at once"

    def say(self, event: Event) -> None:
        """Queue one event. Never waits, never raises."""
        if self._queued - self._written >= _MAX_QUEUE:
            self._dropped += 1
            return
        self._queued += 1
        self._queue.put(event)
        if self._thread is None:
            self._begin()

    def _begin(self) -> None:
        thread = threading.Thread(target=self._run, name="miner-guard-console", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # This host allows no more threads, or the interpreter is exiting. The next event tries
            # again.
            return
        self._thread = thread
        atexit.register(self.flush)

    def flush(self) -> None:
        """Wait a moment for all queued events to be written."""
        end = time.monotonic() + _FLUSH_S
        while self._thread is not None and self._written < self._queued and time.monotonic() < end:
            time.sleep(0.005)

    def detach_after_fork(self) -> None:
        """Discard events from now on, in a forked child, which lacks the thread."""
        self._descriptor = self._thread = None
        atexit.unregister(self.flush)

    def _run(self) -> None:
        while True:
            self._print(self._queue.get())
            if (dropped := self._dropped) and self._queue.empty():
                lines = counted(dropped, "line")
                self._print(degraded(f"could not print {lines} of this rank: {self._why}"))
                self._dropped -= dropped
            self._written += 1

    def _print(self, event: Event) -> None:
        if self._descriptor is None:
            return
        record = {
            "ts": iso_utc(time.time()),
            "level": event.level,
            "event": event.name,
            "msg": event.text,
            "rank": self._rank if event.rank is None else event.rank,
        }
        try:
            line = console_line(self._redactor.value(record), emoji=True)
            os.write(self._descriptor, f"{line}\n".encode("utf-8", "replace"))
        except BlockingIOError:
            # The program has made the pipe non-blocking, and it is full. Later lines may fit.
            self._dropped += 1
            self._why = "the console's pipe is full"
        except OSError:
            # Nobody reads the console anymore, and there is nowhere else to report that.
            self._descriptor = None
        except Exception as error:  # noqa: BLE001 - one event must not silence the others; it is counted and reported
            self._dropped += 1
            self._why = f"{event.name}: {type(error).__name__}: {error}"[:200]
