"""The process that stops the miner if the guard is killed. `deathwatch.Deathwatch` starts it; it
uses only the standard library.

It hides its name, because a miner's updater runs `pkill -9 python`, and operators run `pkill -9 -f
miner-guard`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miner_guard.system import processes
from miner_guard.system.cgroup import Cgroup
from miner_guard.system.processes import Process

NAME = b"last-resort"

_TERM_TO_KILL_S = 2.0
_GIVE_UP_AFTER_S = 20.0
_LOOK_EVERY_S = 0.2
_MAX_LOOK_EVERY_S = 0.5
_COST_TO_PAUSE = 4.0


@dataclass(frozen=True)
class RunToEnd:
    """The run that this process ends if the guard is killed."""

    run_id: str
    state_dir: str
    grace_s: float
    """Time that the miner gets to write checkpoints: the kernel sent the launcher SIGTERM when the
    guard died."""

    cgroup: str | None
    list_fd: int = -1
    """Descriptor of the run's process list as the guard last saw it, one `PID START` line per
    process."""


def main(order: Mapping[str, Any]) -> None:
    """Wait for the guard to exit, then end the run. If a line arrives on stdin before EOF, the
    guard exited cleanly and there is nothing to do."""
    for number in (
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):
        # A service manager that signals the whole group must not kill this process before the
        # guard.
        signal.signal(number, signal.SIG_IGN)
    hide()
    if sys.stdin.readline() == "":
        finish(RunToEnd(**order))


def hide() -> None:
    """Change the name that `ps` shows and `pkill` matches, with and without `-f`."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_bytes(NAME)
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        # arg_start and arg_end, fields 48 and 49 of proc(5).
        start, end = int(fields[45]), int(fields[46])
        if 0 < start < end:
            ctypes.memset(start, 0, end - start)
            ctypes.memmove(start, NAME, min(len(NAME), end - start))


def finish(run: RunToEnd) -> None:
    """End all processes of the run: wait out the launcher's grace period, then send SIGTERM, then
    SIGKILL."""
    search = Search(run)
    search.wait(run.grace_s)
    search.signal(signal.SIGTERM)
    search.signal(signal.SIGCONT)
    search.wait(_TERM_TO_KILL_S)
    deadline = time.monotonic() + _GIVE_UP_AFTER_S
    while search.living() and time.monotonic() < deadline:
        search.kill()
        search.wait(_LOOK_EVERY_S)
    if search.cgroup is not None:
        search.cgroup.remove()


class Search:
    """Finds the run's live processes: those that the guard listed, the members of the cgroup, the
    descendants of both, and those with the run's marker in their environment."""

    def __init__(self, run: RunToEnd) -> None:
        self._run = run
        self.cgroup = Cgroup.of_earlier_guard(run.cgroup)
        self._known = _listed(run.list_fd)

    def living(self) -> set[Process]:
        """The processes that are still running, including new descendants. Empty only if the search
        by marker finds none either."""
        table = processes.table()
        roots = {p.pid for p in self._known if p.pid in table and table[p.pid].process == p}
        if self.cgroup is not None:
            with contextlib.suppress(OSError):
                roots |= self.cgroup.pids()
        found = processes.descendants(roots, table)
        known = {process.pid for process in found}
        others = {pid: seen for pid, seen in table.items() if pid not in known}
        marked = processes.marked(self._run.state_dir, others)
        found |= {process for process, run_id in marked.items() if run_id == self._run.run_id}
        self._known = {process for process in found if process.pid != os.getpid()}
        return self._known

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for all of the run's processes to exit."""
        deadline = time.monotonic() + seconds
        while True:
            began = time.process_time()
            left = self.living()
            pause_s = max(_LOOK_EVERY_S, _COST_TO_PAUSE * (time.process_time() - began))
            now = time.monotonic()
            if not left or now >= deadline:
                return
            time.sleep(min(pause_s, _MAX_LOOK_EVERY_S, deadline - now))

    def signal(self, number: int) -> None:
        for process in self._known:
            with contextlib.suppress(OSError):
                processes.send(process, number)

    def kill(self) -> None:
        if self.cgroup is not None:
            self.cgroup.kill()
        self.signal(signal.SIGKILL)


def _listed(fd: int) -> set[Process]:
    listed: set[Process] = set()
    for line in os.pread(fd, os.fstat(fd).st_size, 0).splitlines():
        # The guard may have been killed while it wrote this line.
        with contextlib.suppress(ValueError):
            pid, start = line.split()
            listed.add(Process(int(pid), int(start)))
    return listed
