"""Ends the run if the keeper is killed.

The deputy waits for EOF on a pipe that only the keeper holds open, and reads the run's processes
from memory that the keeper keeps up to date. It hides its name, because a miner's updater runs
`pkill -9 python`, and operators run `pkill -9 -f miner-guard`. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from miner_guard.system import processes
from miner_guard.system.cgroup import Cgroup
from miner_guard.system.children import memory_file, signal_at_parents_death
from miner_guard.system.processes import HELPER, Process

NAME = b"last-resort"

_GRACE_S = 1.0
"""Time that the miner gets after the kernel sent its launcher SIGTERM for the keeper's death."""

_GIVE_UP_AFTER_S = 20.0
_LOOK_EVERY_S = 0.1

_BOOT = """import sys
packages, run = sys.stdin.readline().split("\\0")
sys.path.insert(0, packages)
from miner_guard.keeper.deputy import main
main(int(run))"""
"""The deputy runs this program. The command line contains neither the guard's name nor its folder,
so that `pkill -f miner-guard` does not match it."""


@dataclass(frozen=True)
class Run:
    """What is known of a run that has to be ended."""

    run_id: str = ""
    state_dir: str = ""
    cgroup: str | None = None
    processes: Sequence[Process] = ()


class RunMemory:
    """The run's description in memory that the keeper and its deputy share."""

    def __init__(self) -> None:
        self.fd = memory_file("miner-guard-run")

    def write(self, run: Run) -> None:
        """Replace the description."""
        head = json.dumps([run.run_id, run.state_dir, run.cgroup]).encode()
        lines = b"".join(b"\n%d %d" % (each.pid, each.start) for each in run.processes)
        # Overwrite, then truncate: the list is nearly complete whenever the keeper is killed.
        os.pwrite(self.fd, head + lines, 0)
        os.ftruncate(self.fd, len(head + lines))


def read(fd: int) -> Run:
    """The description in the memory open as `fd`; it may be torn."""
    head, *lines = os.pread(fd, os.fstat(fd).st_size, 0).split(b"\n")
    listed: list[Process] = []
    for line in lines:
        with contextlib.suppress(ValueError):
            pid, start = line.split()
            listed.append(Process(int(pid), int(start)))
    try:
        run_id, state_dir, cgroup = json.loads(head)
    except ValueError:
        return Run(processes=listed)
    return Run(run_id, state_dir, cgroup, listed)


class Deputy:
    """The keeper's handle on its deputy."""

    def __init__(self) -> None:
        self.memory = RunMemory()
        self._popen: subprocess.Popen[bytes] | None = None
        self._pipe = -1

    @property
    def pid(self) -> int:
        """The deputy's pid; 0 if there is none."""
        return 0 if self._popen is None else self._popen.pid

    def start(self) -> None:
        """Start the process. Raises OSError."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        packages = str(Path(__file__).resolve().parents[2])
        try:
            # Write this before the fork: the keeper may be killed immediately after it.
            os.write(writing, f"{packages}\0{self.memory.fd}\n".encode())
            self._popen = subprocess.Popen(
                # Not a virtual environment's symlink, whose path may contain the guard's name.
                [os.path.realpath(sys.executable), "-I", "-S", "-c", _BOOT],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                pass_fds=(self.memory.fd,),
                # A suspended deputy would not notice that the keeper is gone.
                preexec_fn=lambda: signal_at_parents_death(signal.SIGCONT),
                env={HELPER: "deputy"},
            )
        except OSError:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        self._pipe = writing

    def ended(self) -> None:
        """Note that the deputy has been reaped."""
        if self._popen is not None:
            self._popen.returncode = 0
            self._popen = None
            os.close(self._pipe)

    def dismiss(self) -> None:
        """Make the deputy exit without ending the run."""
        if self._popen is not None:
            with contextlib.suppress(OSError):
                os.write(self._pipe, b"done\n")
            os.kill(self._popen.pid, signal.SIGCONT)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._popen.pid, 0)
            self.ended()


def main(memory: int) -> None:
    """Wait until the keeper is gone, then end its run. A line on stdin means that it exits
    cleanly."""
    for number in (
        *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
        *(signal.SIGUSR1, signal.SIGUSR2),
    ):
        # A service manager that signals the whole group must not end the deputy before the keeper.
        signal.signal(number, signal.SIG_IGN)
    hide()
    if sys.stdin.readline() == "":
        end_run(read(memory), grace_s=_GRACE_S)


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


def end_run(run: Run, grace_s: float) -> None:
    """End all processes of the run: those listed, the members of its cgroup, the descendants of
    both, and those with the run's marker in their environment."""
    cgroup = Cgroup.of_earlier_guard(run.cgroup)
    alive: Iterable[Process] = run.processes
    begin = time.monotonic()
    while time.monotonic() < begin + _GIVE_UP_AFTER_S:
        alive = _living(run, alive, cgroup)
        if not alive:
            break
        if time.monotonic() >= begin + grace_s:
            if cgroup is not None:
                cgroup.kill()
            for process in alive:
                with contextlib.suppress(OSError):
                    processes.send(process, signal.SIGKILL)
        time.sleep(_LOOK_EVERY_S)
    if cgroup is not None:
        cgroup.remove()


def _living(run: Run, last: Iterable[Process], cgroup: Cgroup | None) -> set[Process]:
    table = processes.table()
    roots = {p.pid for p in (*run.processes, *last) if p.pid in table and table[p.pid].process == p}
    if cgroup is not None:
        with contextlib.suppress(OSError):
            roots |= cgroup.pids()
    found = processes.descendants(roots - {os.getpid()}, table)
    listed = {process.pid for process in found}
    others = {pid: seen for pid, seen in table.items() if pid not in listed}
    marked = processes.marked(run.state_dir, others)
    found |= {process for process, run_id in marked.items() if run_id == run.run_id}
    return {process for process in found if process.pid != os.getpid()}
