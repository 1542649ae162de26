"""The guard's watchdog: it stops the miner within the grace period even if the supervisor's loop
hangs.

Its thread waits for signals and checks that the loop is alive. Python's C handler writes the signal
numbers to a pipe that only this thread reads. If the loop makes no progress after a stop request,
the watchdog ends the launch, dumps the stacks of all threads to stderr and exits the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from miner_guard.exits import FAILED
from miner_guard.guard.loop import Loop
from miner_guard.guard.teardown import TERM_TO_KILL_S, UNKILLABLE_S, Teardown
from miner_guard.record.events import Event, event
from miner_guard.system import processes
from miner_guard.system.readiness import ready

SILENT_S = 5.0
"""The loop counts as hung if no iteration ends for this long. It normally runs at least once a
second; with a load average of 20 on 2 cores, its longest iteration took less than a second."""

_LAST_WORDS_S = 20.0
"""Time allowed after the miner exits to send alerts (10 s of this), write the final status, and
close sockets and child processes."""

_INTERPRETER_S = 1.0
_LOOK_EVERY_S = 0.5
_REST_S = 1.0
"""Interval between checks while no stop is requested."""

_PAUSED_S = 3.0
_REPORT_S = 1.0
"""Stop waiting for a report's thread after this long, because whatever hangs the loop may hang the
report too."""


STOP_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGPWR, signal.SIGXCPU),
    *(signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO),
)
"""Signals that trigger a clean stop: by default each of them would end the process."""


@dataclass(frozen=True)
class Hands:
    """The watchdog's side effects; tests replace them."""

    report: Callable[[Event], None]
    teardown: Callable[[], Teardown | None]
    """Creates a teardown for the current launch with the full grace period; None if no launch is
    active. Called from the watchdog's thread."""

    leave: Callable[[int], object] = os._exit
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Watchdog:
    """Watches one loop. `stop_asked` and `leaving` may be called from any thread."""

    def __init__(self, loop: Loop, grace_s: float, hands: Hands) -> None:
        self._loop, self._grace_s, self._hands = loop, grace_s, hands
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._asked_at: float | None = None
        self._leave_at: float | None = None
        self._exit_code = FAILED
        self._silent = False
        self._wedged = False
        self._looked_at = self._resumed_at = hands.monotonic()
        self._main = threading.main_thread().ident

    def start(self) -> None:
        """Start watching. Call from the main thread, after the signal handlers are installed:
        Python writes a signal's number to the pipe only if the signal has a handler."""
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def stop_asked(self) -> None:
        """Start the grace period, unless it is already running."""
        if self._asked_at is None:
            self._asked_at = self._hands.monotonic()

    def leaving(self, exit_code: int, within_s: float) -> None:
        """Record that the process is about to exit with `exit_code`; force that exit after
        `within_s` seconds."""
        self._exit_code, self._leave_at = exit_code, self._hands.monotonic() + within_s

    def left(self) -> None:
        """Record that only the interpreter's shutdown remains. It waits for every job; force the
        exit after one second, so that a hung job costs no more than that."""
        self._leave_at, self._silent = self._hands.monotonic() + _INTERPRETER_S, True

    def _run(self) -> None:
        while True:
            stopping = self._asked_at is not None or self._leave_at is not None
            readable, _ = ready([self._read], _LOOK_EVERY_S if stopping else _REST_S)
            if readable:
                with contextlib.suppress(BlockingIOError):
                    self._hear(os.read(self._read, 4096))
                # The signal may have interrupted a thread other than the loop's.
                self._loop.wake()
            # A failure here must not stop the watchdog.
            with contextlib.suppress(Exception):
                self.check()

    def _hear(self, numbers: bytes) -> None:
        if any(number in STOP_SIGNALS for number in numbers):
            self.stop_asked()

    def check(self) -> None:
        """Act if the loop has made no progress for too long, or if a stop has taken too long."""
        now = self._hands.monotonic()
        if now - self._looked_at > _PAUSED_S:
            # The whole process or host was suspended, so the loop did not run either.
            self._resumed_at = now
        self._looked_at = now
        silent = now - max(self._loop.turned_at, self._resumed_at)
        if self._leave_at is not None:
            if now >= self._leave_at:
                self._leave("the guard did not exit")
        elif silent >= SILENT_S:
            self._say_wedged(silent)
            if self._asked_at is not None:
                self._end_launch()
                if (
                    self._hands.monotonic() - self._loop.turned_at >= SILENT_S
                    and self._leave_at is None
                ):
                    self._leave("the supervisor's loop is hung")
        else:
            self._wedged = False
            if self._asked_at is not None and now - self._asked_at >= self._longest_stop_s():
                self._end_launch()
                self._leave("the shutdown is not making progress")

    def _longest_stop_s(self) -> float:
        return self._grace_s + TERM_TO_KILL_S + UNKILLABLE_S + _LAST_WORDS_S

    def _say_wedged(self, silent: float) -> None:
        if self._wedged:
            return
        self._wedged = True
        frame = sys._current_frames().get(self._main or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "unknown"
        logged = event(
            "guard_wedged",
            "critical",
            f"GUARD WEDGED: its main loop has been stuck for {round(silent, 1):.0f}s in "
            f"{where}; the miner keeps running",
            seconds=round(silent, 1),
            where=where,
            stack=traceback.format_list(stack),
        )
        self._within_a_second(lambda: self._hands.report(logged))

    def _end_launch(self) -> None:
        """End the launch as the loop would: send SIGTERM, wait out the grace period, then send
        SIGKILL, until none of the launch's processes is left."""
        teardown = self._hands.teardown()
        if teardown is None:
            return
        teardown.ask()
        launcher_lives = True
        while (again := self._step(teardown)) is not None:
            self._hands.sleep(min(again, _LOOK_EVERY_S))
            if launcher_lives and not processes.alive(teardown.launcher):
                launcher_lives = False
                teardown.ended()
        self._looked_at = self._hands.monotonic()

    def _step(self, teardown: Teardown) -> float | None:
        try:
            return teardown.step()
        except OSError:
            return _LOOK_EVERY_S

    def _leave(self, why: str) -> None:
        if not self._silent:
            self._within_a_second(lambda: _dump(why))
        self._hands.leave(self._exit_code)

    def _within_a_second(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="watchdog-report", daemon=True)
        thread.start()
        thread.join(_REPORT_S)


def _dump(why: str) -> None:
    """Write all stacks to descriptor 2 directly, because the hang may be in Python's streams or in
    the log."""
    with contextlib.suppress(OSError):
        os.write(2, f"miner-guard: {why}; stacks of all threads:\n".encode())
        faulthandler.dump_traceback(file=2, all_threads=True)
