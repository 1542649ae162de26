"""Ends one launch: the launcher first, then its leftovers, until no process is left. Ends the whole
run at once if its keeper was killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from miner_guard.system import processes
from miner_guard.system.processes import Process

TERM_TO_KILL_S = 2.0
"""Time between SIGTERM and SIGKILL for the processes that the launcher leaves behind."""

SETTLE_S = 0.25
"""Time for the launcher's children to exit after it; until then they do not count as orphans."""

UNKILLABLE_S = 5.0
"""If a process survives SIGKILL for this long, the guard reports it and stops waiting for it."""

_LOOK_EVERY_S = 0.02
_MAX_LOOK_EVERY_S = 0.5
_COST_TO_PAUSE = 4.0
"""Pause between searches over the last one's CPU time: 3,000 processes must not use a CPU."""

MAX_NAMED = 50
"""Processes whose command lines are kept for the report; the rest are only counted."""


@dataclass
class Teardown:
    """Ends one launch without blocking: call `step` until it returns None."""

    members: Callable[[], set[Process]]
    """Returns the launch's live processes. Raises OSError if they can't be listed."""

    launcher: Process
    asks_with: int = signal.SIGTERM
    killed: list[tuple[Process, str]] = field(default_factory=list)
    """Processes other than the launcher that were signalled, with their command lines."""

    stuck: list[Process] = field(default_factory=list)
    """Processes that survived SIGKILL."""

    _stage: str = "settle"
    _since: float = 0.0
    _grace_s: float = 0.0
    _signalled: set[Process] = field(default_factory=set)

    def ask(self, grace_s: float) -> None:
        """Make the next step send `asks_with` only to the launcher, so that it can stop its
        ranks cleanly within `grace_s`."""
        self._stage, self._since, self._grace_s = "asked", time.monotonic(), grace_s

    def launcher_ended(self) -> None:
        """End the leftovers next, because the launcher has been reaped."""
        if self._stage in ("asked", "settle"):
            self._stage, self._since = "settle", time.monotonic()

    def step(self) -> float | None:
        """Advance the teardown. Returns seconds until the next call, or None when every process is
        gone or can't be killed. Raises OSError if processes can't be inspected or signalled: call
        again later."""
        waited = time.monotonic() - self._since
        if self._stage == "asked" and not self._signalled:
            # A stopped process (SIGSTOP, a debugger) acts on it only when it continues.
            processes.send(self.launcher, self.asks_with, signal.SIGCONT)
            self._signalled = {self.launcher}
            # So do the ranks that the launcher ends: torchrun would wait 30 s for one.
            for process in self.members() - {self.launcher}:
                if (entry := processes.stat(process.pid)) and entry.state == "T":
                    processes.send(process, signal.SIGCONT)
        if self._stage == "asked" and waited < self._grace_s:
            return self._grace_s - waited
        began = time.thread_time()
        remaining = self.members()
        pause_s = max(_LOOK_EVERY_S, _COST_TO_PAUSE * (time.thread_time() - began))
        if not remaining:
            return None
        if self._stage == "asked" or (self._stage == "settle" and waited >= SETTLE_S):
            self._enter("term", remaining, signal.SIGTERM, signal.SIGCONT)
        elif self._stage == "term" and waited >= TERM_TO_KILL_S:
            self._enter("kill", remaining, signal.SIGKILL)
        elif self._stage == "kill":
            self._send(remaining - self._signalled, signal.SIGKILL)
            if waited >= UNKILLABLE_S:
                self.stuck = sorted(remaining, key=lambda p: p.pid)
                return None
        return min(pause_s, _MAX_LOOK_EVERY_S)

    def _enter(self, stage: str, targets: set[Process], *numbers: int) -> None:
        self._stage, self._since, self._signalled = stage, time.monotonic(), set()
        self._send(targets, *numbers)

    def _send(self, targets: set[Process], *numbers: int) -> None:
        reported = {process for process, _ in self.killed} | {self.launcher}
        for process in sorted(targets, key=lambda p: p.pid):
            new = process not in reported
            # Beyond the limit, the report only counts processes.
            words = processes.command(process.pid) if new and len(self.killed) < MAX_NAMED else ""
            if processes.send(process, *numbers) and new:
                self.killed.append((process, words))
            self._signalled.add(process)


def why_stuck(process: Process) -> str:
    """Explain why a process outlived SIGKILL, as far as /proc shows."""
    try:
        if (entry := processes.stat(process.pid)) and entry.state == "D":
            return "it is blocked in the kernel (D state)"
        os.kill(process.pid, 0)
    except OSError as error:
        return str(error.strerror)
    return "the keeper sent the signal, but the process is still there"


ABANDONED_GRACE_S = 1.0
"""Time between SIGTERM and SIGKILL for a run that lost its keeper, whose death sends SIGTERM."""

_GIVE_UP_AFTER_S = 8.0
_LOOK_AGAIN_S = 0.1


def end_at_once(look: Callable[[], Collection[Process]], grace_s: float) -> dict[Process, str]:
    """End the processes that `look` finds, with SIGTERM and after `grace_s` with SIGKILL, until it
    finds none. Returns what was found, with the command lines."""
    signalled: dict[Process, str] = {}
    begin = time.monotonic()
    while alive := look():
        over = time.monotonic() - begin >= grace_s
        for process in alive:
            numbers = () if process in signalled else (signal.SIGTERM, signal.SIGCONT)
            signalled.setdefault(process, processes.command(process.pid))
            with contextlib.suppress(OSError):
                processes.send(process, *numbers, *((signal.SIGKILL,) if over else ()))
        if time.monotonic() - begin >= grace_s + _GIVE_UP_AFTER_S:
            break
        time.sleep(_LOOK_AGAIN_S)
    return signalled


def reap() -> Iterator[tuple[int, int]]:
    """Reap every child that has ended; yields pid and status of each."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            yield ended


def end_descendants() -> None:
    """End everything below this process, which is a subreaper and has lost what watched over it."""

    def look() -> Collection[Process]:
        list(reap())
        with contextlib.suppress(OSError):
            table = processes.table()
            child_pids = (pid for pid, entry in table.items() if entry.parent == os.getpid())
            hidden = (Process(pid, 0) for pid in processes.hidden_children(table))
            return {*processes.descendants(child_pids, table), *hidden}
        return ()

    end_at_once(look, ABANDONED_GRACE_S)
