"""The supervisor's event loop: file descriptors, timers, signals, and calls from other threads."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable

from miner_guard.system.clock import Clock
from miner_guard.system.descriptors import WakePipe

_MAX_WAIT_S = 60.0
_PAUSE_S = 0.05
"""Pause after a failure, so that a recurring bug does not use a full core."""


class Loop:
    """Waits for the next event and calls its handler. Everything runs on the thread that calls
    `turn`; each call to `turn` is one iteration.

    Failures do not stop the loop: it reports a handler that raises and keeps it registered. Signal
    handlers only record the signal's number; `turn` does the work.
    """

    def __init__(self, clock: Clock, on_error: Callable[[Exception], None]) -> None:
        """`on_error` receives a handler's exception; the loop continues."""
        self.on_error = on_error
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        """When, in monotonic seconds, which of those due at once first, and what."""

        self._order = itertools.count()
        self._calls: deque[Callable[[], object]] = deque()
        self._wakeup = WakePipe()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._arrived: deque[int] = deque()
        self.watch(self._wakeup.reading, self._wakeup.clear)
        self.wake = self._wakeup.wake
        """Wakes the loop from its wait. Callable from any thread and from a signal handler."""

    def watch(self, fd: int, call: Callable[[], None]) -> None:
        """Run `call` whenever `fd` is readable or at EOF."""
        self._selector.register(fd, selectors.EVENT_READ, call)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`; a no-op if it is not watched."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def after(self, seconds: float, call: Callable[[], None]) -> float:
        """Run `call` once, `seconds` from now; returns when, in monotonic seconds."""
        when = self._clock.monotonic() + seconds
        heapq.heappush(self._timers, (when, next(self._order), call))
        return when

    def every(self, seconds: float | Callable[[], float], call: Callable[[], None]) -> None:
        """Run `call` every `seconds`, even after it has failed. If `seconds` is a function, the
        loop calls it before each wait. Calls are due at multiples of `seconds`, so that timers
        with different intervals wake the loop together."""

        def wait() -> None:
            interval = seconds() if callable(seconds) else seconds
            self.after(interval - self._clock.monotonic() % interval, due)

        def due() -> None:
            wait()
            call()

        self.after(seconds() if callable(seconds) else seconds, due)

    def soon(self, call: Callable[[], object]) -> None:
        """Run `call` on the loop's thread in the loop's next iteration. May be called from any
        thread."""
        self._calls.append(call)
        self.wake()

    def on_signal(self, number: int, call: Callable[[], None]) -> None:
        """Run `call` on the loop's thread whenever signal `number` arrives. Call from the main
        thread only."""
        self._handlers[number] = call
        signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        # Python may run this between any two bytecodes of the main thread, so it must not
        # raise.
        self._arrived.append(number)
        self.wake()

    def turn(self) -> None:
        """Wait for one or more events and handle them. Never raises."""
        try:
            self._turn()
        except Exception as error:  # noqa: BLE001 - a failure here must not stop the miner; the error is reported
            self._report(error)
            time.sleep(_PAUSE_S)

    def _turn(self) -> None:
        for key, _events in self._selector.select(self._wait_s()):
            # An earlier handler may have closed this descriptor.
            if self._selector.get_map().get(key.fd) is key and not self.attempt(key.data):
                time.sleep(_PAUSE_S)
        while self._arrived:
            self.attempt(self._handlers[self._arrived.popleft()])
        self.drain()
        now = self._clock.monotonic()
        while self._timers and self._timers[0][0] <= now:
            self.attempt(heapq.heappop(self._timers)[2])

    def drain(self) -> None:
        """Run the calls that other threads have queued, without waiting for more."""
        while self._calls:
            self.attempt(self._calls.popleft())

    def attempt(self, call: Callable[[], object]) -> bool:
        """Run `call`; report its exception and return False if it raises. One failed step must not
        prevent the next."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a bug in the guard must not stop the miner; the error is reported
            self._report(error)
            return False
        return True

    def _report(self, error: Exception) -> None:
        # If the report fails too, ignore it; supervision comes first.
        with contextlib.suppress(Exception):
            self.on_error(error)

    def _wait_s(self) -> float:
        if self._calls or self._arrived:
            return 0.0
        if not self._timers:
            return _MAX_WAIT_S
        return min(_MAX_WAIT_S, max(0.0, self._timers[0][0] - self._clock.monotonic()))

    def close(self) -> None:
        """Close the loop's descriptors. The signals stay ignored, so that they do not change the
        exit code of a process that is about to exit."""
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)
        self._selector.close()
        self._wakeup.close()
