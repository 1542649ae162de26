"""The supervisor's one thread: file descriptors, timers, signals, and calls from other threads."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from miner_guard.clock import Clock

_LONGEST_WAIT_S = 60.0


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
    """Waits for whatever comes first and calls its handler, all in the thread that calls `turn`."""

    def __init__(self, clock: Clock, on_error: Callable[[Exception], None]) -> None:
        """`on_error` hears of a handler that failed; the loop goes on."""
        self.on_error = on_error
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._timers: list[Timer] = []
        self._order = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._signals: dict[int, Callable[[], None]] = {}
        self._before: dict[int, object] = {}
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)

    def watch(self, fd: int, call: Callable[[], None]) -> None:
        """Call when `fd` is readable or at its end."""
        self._selector.register(fd, selectors.EVENT_READ, call)

    def unwatch(self, fd: int) -> None:
        """Forget `fd`; harmless where it is not watched."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def watched(self, fd: int) -> bool:
        return fd in self._selector.get_map()

    def after(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Call once in `seconds`."""
        timer = Timer(self._clock.monotonic() + seconds, next(self._order), call)
        heapq.heappush(self._timers, timer)
        return timer

    def soon(self, call: Callable[[], None]) -> None:
        """Call in the loop's thread at its next turn. Safe from any thread."""
        self._calls.append(call)
        # A full pipe wakes the loop all the same; a closed one has nobody to wake.
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\0")

    def on_signal(self, number: int, call: Callable[[], None]) -> None:
        """Call in the loop's thread when the signal arrives. From the main thread only."""
        if not self._signals:
            signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._signals[number] = call
        # Without a Python handler the wakeup descriptor is not written.
        self._before[number] = signal.signal(number, lambda _number, _frame: None)

    def turn(self) -> None:
        """Wait for one or more things to happen and handle them."""
        for key, _events in self._selector.select(self._wait_s()):
            # A handler before this one may have closed it.
            if self._selector.get_map().get(key.fd) is key and not self._safely(key.data):
                self.unwatch(key.fd)
        self.drain()
        now = self._clock.monotonic()
        while self._timers and self._timers[0].when <= now:
            timer = heapq.heappop(self._timers)
            if not timer.cancelled:
                self._safely(timer.call)

    def drain(self) -> None:
        """Do what other threads have asked for, without waiting."""
        while self._calls:
            self._safely(self._calls.popleft())

    def _safely(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a defect of the guard must not end the miner; it is reported
            self.on_error(error)
            return False
        return True

    def _wait_s(self) -> float:
        if self._calls:
            return 0.0
        while self._timers and self._timers[0].cancelled:
            heapq.heappop(self._timers)
        if not self._timers:
            return _LONGEST_WAIT_S
        return min(_LONGEST_WAIT_S, max(0.0, self._timers[0].when - self._clock.monotonic()))

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._wake_read, 4096):
                if number in self._signals:
                    self._signals[number]()

    def keep_signals(self) -> None:
        """After `close` they do nothing: for a process that is about to end, whose exit code they must not change."""
        # Ignored, since Python gives any other handler back to the default while it ends. An ignored SIGCHLD has a
        # meaning of its own.
        ignored = self._before.keys() - {signal.SIGCHLD}
        self._before |= dict.fromkeys(ignored, signal.SIG_IGN)

    def close(self) -> None:
        """Give the signals back and close what the loop opened."""
        if self._signals:
            signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
