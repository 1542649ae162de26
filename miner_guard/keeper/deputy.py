"""Ends the run if the keeper is killed, and the guard with it.

The kernel's signal at a parent's death reaches the launcher alone, not what it started. So a fork
of the keeper, which shares nearly all of its memory, waits for EOF on a pipe that only the keeper
holds open, and reads the run's processes from memory that the keeper keeps up to date. It hides its
name, because a miner's updater runs `pkill -9 python`, and operators run `pkill -9 -f miner-guard`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import mmap
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from miner_guard.system import processes
from miner_guard.system.children import continue_when_the_parent_dies
from miner_guard.system.processes import Cgroup, Process

NAME = b"last-resort"

_GRACE_S = 1.0
"""Time between SIGTERM and SIGKILL: the kernel sent the launcher SIGTERM when the keeper died."""

_GIVE_UP_AFTER_S = 8.0
_LOOK_EVERY_S = 0.1

_HALF = 1 << 20
"""Bytes for one description of the run, of which the memory holds two."""

_MAX_LISTED = 40_000


@dataclass(frozen=True)
class Run:
    """What is known of a run that has to be ended."""

    state_dir: str = ""
    run_id: str | None = ""
    """None: every run in this state directory."""

    cgroups: Sequence[str] = ()
    processes: Sequence[Process] = ()


class RunMemory:
    """The run's description in memory that the keeper and its deputy share."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 2 * _HALF + 1)

    def write(self, run: Run) -> None:
        """Replace the description. A keeper that is killed meanwhile leaves the previous one."""
        listed = [[each.pid, each.start] for each in run.processes[:_MAX_LISTED]]
        text = json.dumps([run.state_dir, run.run_id, list(run.cgroups), listed]).encode()
        half = 1 - self._map[0]
        start = 1 + half * _HALF
        self._map[start : start + len(text) + 1] = text + b"\0"
        self._map[0] = half

    def read(self) -> Run:
        """The latest description."""
        start = 1 + self._map[0] * _HALF
        text = self._map[start : self._map.find(b"\0", start)]
        if not text:
            return Run()
        state_dir, run_id, cgroups, listed = json.loads(text)
        return Run(state_dir, run_id, cgroups, [Process(*each) for each in listed])


class Deputy:
    """The keeper's handle on its deputy."""

    def __init__(self) -> None:
        self.memory = RunMemory()
        self.pid = 0
        """0 if there is none."""

        self._pipe = -1

    def start(self) -> None:
        """Fork the process. Raises OSError."""
        reading, self._pipe = os.pipe()
        try:
            self.pid = os.fork()
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            if self.pid:
                os.close(reading)
        if self.pid == 0:
            _live(reading, self.memory)

    def ended(self) -> None:
        """Note that the deputy has been reaped."""
        self.pid = 0
        os.close(self._pipe)

    def dismiss(self) -> None:
        """Make the deputy exit without ending the run."""
        if self.pid:
            with contextlib.suppress(OSError):
                os.write(self._pipe, b"d")
                os.kill(self.pid, signal.SIGCONT)
                os.waitpid(self.pid, 0)


def _live(reading: int, memory: RunMemory) -> None:
    """The deputy's life. Never returns."""
    try:
        gc.disable()
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP}:
            # A service manager that signals the whole group must not end the deputy before the
            # keeper.
            with contextlib.suppress(OSError):
                signal.signal(number, signal.SIG_IGN)
        continue_when_the_parent_dies()
        os.setsid()
        os.chdir("/")
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd != reading:
                with contextlib.suppress(OSError):
                    os.close(fd)
        _hide()
        if not os.read(reading, 1):
            end_run(memory.read(), _GRACE_S)
    finally:
        os._exit(0)


def _hide() -> None:
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


def end_run(run: Run, grace_s: float) -> dict[Process, str]:
    """End all processes of a run with SIGTERM, after `grace_s` with SIGKILL: those listed, the
    members of its cgroups, the descendants of both, and those with the run's marker in their
    environment. Returns what was found, with the command lines."""
    groups = [Cgroup(Path(path)) for path in run.cgroups]
    found: dict[Process, str] = {}
    begin = time.monotonic()
    alive: Iterable[Process] = run.processes
    while alive := _living(run, alive, groups):
        over = time.monotonic() - begin >= grace_s
        for process in alive:
            numbers = () if process in found else (signal.SIGTERM, signal.SIGCONT)
            found.setdefault(process, processes.command(process.pid))
            with contextlib.suppress(OSError):
                processes.send(process, *numbers, *((signal.SIGKILL,) if over else ()))
        if over:
            for group in groups:
                group.kill()
        if time.monotonic() - begin >= grace_s + _GIVE_UP_AFTER_S:
            break
        time.sleep(_LOOK_EVERY_S)
    for group in groups:
        group.remove()
    return found


def _living(run: Run, last: Iterable[Process], groups: Sequence[Cgroup]) -> set[Process]:
    table, spared = processes.table(), processes.ancestors(os.getpid())
    roots = {each.pid for each in last if each.pid in table and table[each.pid].process == each}
    for group in groups:
        with contextlib.suppress(OSError):
            roots |= group.pids()
    found = processes.descendants(roots - spared, table)
    marked = processes.marked(run.state_dir, table)
    found |= {each for each, run_id in marked.items() if run.run_id in (None, run_id)}
    return {process for process in found if process.pid not in spared}
