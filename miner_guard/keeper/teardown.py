"""Ends one launch: the launcher first, then its leftovers, until no process is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from miner_guard.system import processes
from miner_guard.system.processes import Process

TERM_TO_KILL_S = 2.0
"""Time between SIGTERM and SIGKILL for the processes that the launcher leaves behind."""

SETTLE_S = 0.25
"""Time for the launcher's children to exit after the launcher; until then they do not count as
orphans."""

UNKILLABLE_S = 5.0
"""If a process survives SIGKILL for this long, the guard reports why and stops waiting for it."""

_LOOK_EVERY_S = 0.02
_MAX_LOOK_EVERY_S = 0.5
_COST_TO_PAUSE = 4.0
"""Pause between searches, as a multiple of the CPU time that the last one took, up to
`_MAX_LOOK_EVERY_S`. The multiple keeps the search through 3,000 processes from using a whole CPU;
the limit keeps a busy machine from delaying the teardown by half a minute."""

MAX_NAMED = 50
"""Processes whose command lines are kept for the report; the rest are only counted."""


@dataclass
class Teardown:
    """Ends one launch without blocking: call `step` until it returns None."""

    leftovers: Callable[[], set[Process]]
    """Returns the launch's live processes except the launcher."""

    launcher: Process
    grace_s: float
    kill_all: Callable[[], None] = lambda: None
    """Sends SIGKILL to all processes at once, if possible; each process also gets its own
    SIGKILL."""

    killed: list[tuple[Process, str]] = field(default_factory=list)
    """Processes other than the launcher that were signalled, with their command lines."""

    stuck: list[Process] = field(default_factory=list)
    """Processes that survived SIGKILL."""

    _stage: str = "launcher"
    _since: float = 0.0
    _asked: bool = True
    _signalled: set[Process] = field(default_factory=set)

    def ask(self) -> None:
        """Make the next step send SIGTERM only to the launcher, so that it can stop its ranks
        cleanly."""
        self._stage, self._since = "launcher", time.monotonic()
        self._asked = False

    def ended(self) -> None:
        """End the leftovers next, because the launcher has been reaped."""
        self._stage, self._since = "settle", time.monotonic()

    def step(self) -> float | None:
        """Advance the teardown. Returns seconds until the next call, or None when every process is
        gone or can't be killed.

        Raises OSError if processes can't be inspected or signalled: call again later.
        """
        waited = time.monotonic() - self._since
        if self._stage == "launcher":
            if not self._asked:
                # A stopped process (SIGSTOP, a debugger) acts on SIGTERM only when it continues.
                processes.send(self.launcher, signal.SIGTERM, signal.SIGCONT)
                self._asked = True
            if waited < self.grace_s:
                return self.grace_s - waited
            self._enter("term", signal.SIGTERM, {self.launcher} | self.leftovers())
            return _LOOK_EVERY_S
        began = time.thread_time()
        left = self.leftovers() | ({self.launcher} if processes.alive(self.launcher) else set())
        pause_s = max(_LOOK_EVERY_S, _COST_TO_PAUSE * (time.thread_time() - began))
        if not left:
            return None
        if self._stage == "settle" and waited >= SETTLE_S:
            self._enter("term", signal.SIGTERM, left)
        elif self._stage == "term" and waited >= TERM_TO_KILL_S:
            self.kill_all()
            self._enter("kill", signal.SIGKILL, left)
        elif self._stage == "kill":
            self._send(signal.SIGKILL, left - self._signalled)
            if waited >= UNKILLABLE_S:
                self.stuck = sorted(left, key=lambda p: p.pid)
                return None
        return min(pause_s, _MAX_LOOK_EVERY_S)

    def _enter(self, stage: str, number: int, targets: set[Process]) -> None:
        self._stage, self._since, self._signalled = stage, time.monotonic(), set()
        self._send(number, targets)

    def _send(self, number: int, targets: set[Process]) -> None:
        known = {process for process, _ in self.killed}
        for process in sorted(targets, key=lambda p: p.pid):
            if process.pid == os.getpid():
                continue
            new = process not in known and process != self.launcher
            # Beyond the limit, the report only counts processes, so their command lines are not
            # needed.
            named = new and len(self.killed) < MAX_NAMED
            words = processes.command(process.pid) if named else ""
            numbers = (number, signal.SIGCONT) if number == signal.SIGTERM else (number,)
            if processes.send(process, *numbers) and new:
                self.killed.append((process, words))
            self._signalled.add(process)


def why_stuck(process: Process) -> str:
    """Explain why a process outlived SIGKILL, as far as /proc shows."""
    try:
        seen = processes.stat(process.pid)
    except OSError as error:
        return f"its state can't be read ({error.strerror})"
    if seen is None or seen.process != process:
        return "it has exited since"
    if seen.state == "D":
        return "it is blocked in the kernel (D state)"
    if not processes.send(process, 0):
        return f"this user lacks permission to signal it (state {seen.state})"
    return f"the guard sent the signal, but the process is in state {seen.state}"
