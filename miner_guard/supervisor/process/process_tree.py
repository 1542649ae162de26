"""The processes of the current launch: who they are, what is left of them, and those that need a
parent's last duty."""

from __future__ import annotations

import os

from miner_guard.state_dir import StateDir
from miner_guard.supervisor.process.pid_registry import PidRegistry
from miner_guard.system import processes
from miner_guard.system.clock import Clock
from miner_guard.system.processes import Process

_LIST_EVERY_S = 5.0

_UNWANTED_S = 10.0
"""A zombie child so old is nobody's but an orphan's: whoever starts a helper waits for it
sooner."""


class ProcessTree:
    """For the supervisor's thread."""

    def __init__(self, state: StateDir, clock: Clock) -> None:
        self._state, self._clock = state, clock
        self._roster = PidRegistry(state)
        self._listed_at = float("-inf")
        self._known: frozenset[Process] = frozenset()
        self._zombies: dict[Process, float] = {}

    def look(self, launcher: Process | None) -> None:
        """About twice a second: reap orphans that ended, keep the list of those that live."""
        now = self._clock.monotonic()
        self._reap(launcher, now)
        if now - self._listed_at >= _LIST_EVERY_S:
            self._listed_at = now
            own = processes.tree(launcher.pid) if launcher is not None else set()
            self._known = frozenset(own | processes.adopted(os.getpid()))
            self._roster.write(self._known)

    def leftovers(self, launcher: Process) -> set[Process]:
        """Living processes of the launch but the launcher: by marker, by parentage, and those
        listed before."""
        found = set(processes.marked(str(self._state.root))) | processes.adopted(os.getpid())
        found |= {process for process in self._known if processes.alive(process)}
        spared = processes.ancestors(os.getpid())
        return {process for process in found if process.pid not in spared and process != launcher}

    def _reap(self, launcher: Process | None, now: float) -> None:
        zombies: dict[Process, float] = {}
        for pid in processes.children(os.getpid()):
            seen = processes.stat(pid)
            if seen is None or seen.state != "Z" or seen.process == launcher:
                continue
            since = self._zombies.get(seen.process, now)
            zombies[seen.process] = since
            if now - since >= _UNWANTED_S:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
        self._zombies = zombies
