"""The supervisor's one thread: file descriptors, timers, signals, and calls from other threads."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from miner_guard.system.clock import Clock

_MAX_WAIT_S = 60.0
REST_S = 1.0
"""How long a descriptor is left alone whose handler failed, or could do nothing."""

_PAUSE_S = 0.05
"""After a turn that failed as a whole: a defect that repeats must not take a core."""


@dataclass(order=True)
class Timer:
    """A call that is due at a monotonic time."""

    when: float
    order: int
    call: Callable[[], None] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        """Never call; harmless when it already was."""
        self.cancelled = True


class Loop:
    """Waits for whatever comes first and calls its handler, all in the thread that calls `turn`.

    No failure makes it deaf: a handler that raises is reported and stays in place. A signal handler
    only leaves its number; what is to be done happens in `turn`.
    """

    def __init__(self, clock: Clock, on_error: Callable[[Exception], None]) -> None:
        """`on_error` is called with what a handler raised; the loop continues."""
        self.on_error = on_error
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._timers: list[Timer] = []
        self._order = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._handlers: dict[int, Callable[[], None]] = {}
        self._arrived: deque[int] = deque()
        self._before: dict[int, object] = {}
        self._resting: dict[int, Timer] = {}
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)
        self.turned_at = math.inf
        """When the latest turn ended, or its thread last gave a sign of life; for the watchdog.
        Infinite before the first."""

    def watch(self, fd: int, call: Callable[[], None]) -> None:
        """Call when `fd` is readable or at its end."""
        self._forget_rest(fd)
        self._selector.register(fd, selectors.EVENT_READ, call)

    def unwatch(self, fd: int) -> None:
        """Forget `fd`; harmless where it is not watched."""
        self._forget_rest(fd)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def watched(self, fd: int) -> bool:
        """Whether the loop waits for `fd` now."""
        return fd in self._selector.get_map()

    def rest(self, fd: int) -> None:
        """Leave a watched `fd` alone for a while: what makes it ready can't be handled now."""
        call = self._selector.get_key(fd).data
        self._selector.unregister(fd)
        self._resting[fd] = self.after(REST_S, lambda: self.watch(fd, call))

    def _forget_rest(self, fd: int) -> None:
        timer = self._resting.pop(fd, None)
        if timer is not None:
            timer.cancel()

    def after(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Call once in `seconds`."""
        timer = Timer(self._clock.monotonic() + seconds, next(self._order), call)
        heapq.heappush(self._timers, timer)
        return timer

    def every(self, seconds: float, call: Callable[[], None]) -> None:
        """Call in `seconds`, and again and again, whether it fails or not."""

        def due() -> None:
            self.after(seconds, due)
            call()

        self.after(seconds, due)

    def soon(self, call: Callable[[], None]) -> None:
        """Call in the loop's thread at its next turn. Safe from any thread."""
        self._calls.append(call)
        self.wake()

    def wake(self) -> None:
        """End the wait of the current turn. Safe from any thread and from a signal handler."""
        # A full pipe wakes the loop as well; a closed one belongs to a loop that has ended.
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\0")

    def on_signal(self, number: int, call: Callable[[], None]) -> None:
        """Call in the loop's thread when the signal arrives. From the main thread only."""
        self._handlers[number] = call
        self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        # Python runs this between any two bytecodes of the main thread: nothing in here can fail.
        self._arrived.append(number)
        self.wake()

    def turn(self) -> None:
        """Wait for one or more things to happen and handle them. Never raises."""
        try:
            self._turn()
        except Exception as error:  # noqa: BLE001 - whatever fails here must not end the miner; it is reported
            self._report(error)
            time.sleep(_PAUSE_S)
        self.alive()

    def alive(self) -> None:
        """A sign of life from the loop's thread, for the watchdog."""
        self.turned_at = self._clock.monotonic()

    def _turn(self) -> None:
        for key, _events in self._selector.select(self._wait_s()):
            # A handler before this one may have closed it.
            if self._is_current(key) and not self.attempt(key.data) and self._is_current(key):
                self.rest(key.fd)
        while self._arrived:
            self.attempt(self._handlers[self._arrived.popleft()])
        self.drain()
        now = self._clock.monotonic()
        while self._timers and self._timers[0].when <= now:
            timer = heapq.heappop(self._timers)
            if not timer.cancelled:
                self.attempt(timer.call)

    def _is_current(self, key: selectors.SelectorKey) -> bool:
        return self._selector.get_map().get(key.fd) is key

    def drain(self) -> None:
        """Do what other threads have asked for, without waiting."""
        while self._calls:
            self.attempt(self._calls.popleft())

    def attempt(self, call: Callable[[], object]) -> bool:
        """Call; False where it raised, which is reported. One failing step must not cost the next
        one."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a defect of the guard must not end the miner; it is reported
            self._report(error)
            return False
        return True

    def _report(self, error: Exception) -> None:
        # A report that fails as well has no other way out; supervision comes first.
        with contextlib.suppress(Exception):
            self.on_error(error)

    def _wait_s(self) -> float:
        if self._calls or self._arrived:
            return 0.0
        while self._timers and self._timers[0].cancelled:
            heapq.heappop(self._timers)
        if not self._timers:
            return _MAX_WAIT_S
        return min(_MAX_WAIT_S, max(0.0, self._timers[0].when - self._clock.monotonic()))

    def _woken(self) -> None:
        with contextlib.suppress(OSError):
            os.read(self._wake_read, 4096)

    def keep_signals(self) -> None:
        """After `close` they do nothing: for a process that is about to end, whose exit code they
        must not change."""
        # Ignored, since Python gives any other handler back to the default while it ends. An
        # ignored SIGCHLD has a meaning of its own.
        ignored = self._before.keys() - {signal.SIGCHLD}
        self._before |= dict.fromkeys(ignored, signal.SIG_IGN)

    def close(self) -> None:
        """Give the signals back and close what the loop opened."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
