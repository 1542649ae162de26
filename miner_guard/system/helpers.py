"""The guard's helper processes: identifies them among its children, measures their CPU time, and
ends them.

The guard marks its own environment (`processes.HELPER`). Every process that it starts for itself
inherits the mark; the miner's environment lacks it. To measure CPU time the guard needs no list of
helpers: of the children that it has reaped, all are helpers except the miner's processes.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from miner_guard.system import processes
from miner_guard.system.processes import Process, Stat

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_outliving: set[int] = set()
"""Pids of helpers that `end_helpers` does not kill."""

_miners_reaped_s = 0.0
"""CPU seconds of the miner's processes that the guard has reaped: the kernel counts them among the
guard's reaped children."""


def reap_miners(pid: int) -> int | None:
    """Reap a child that belongs to the miner, without waiting. Returns its wait status, or None if
    it is still running. Raises ChildProcessError if it has already been reaped. Call from one
    thread only."""
    global _miners_reaped_s
    reaped, status, usage = os.wait4(pid, os.WNOHANG)
    if reaped == 0:
        return None
    _miners_reaped_s += usage.ru_utime + usage.ru_stime
    return status


class HelperFilter:
    """Tells which of the guard's children are its helpers and which belong to the miner. Use from
    one thread only."""

    def __init__(self) -> None:
        self._own_command = processes.command(os.getpid())
        self._known: Mapping[Process, bool] = {}

    def judge(self, children: Iterable[Stat]) -> dict[Process, bool | None]:
        """Return, for each child, whether it is a helper; None if that is not known (yet). Reads
        each child's environment only once."""
        judged = {seen.process: self._judged(seen) for seen in children}
        self._known = {process: helper for process, helper in judged.items() if helper is not None}
        return judged

    def _judged(self, seen: Stat) -> bool | None:
        known = self._known.get(seen.process)
        # A zombie no longer has an environment, and reading that of a process in D state can block
        # on a lock in the kernel.
        if known is not None or seen.state in "ZXD":
            return known
        return processes.is_helper(seen.process.pid, self._own_command)


class HelperCpu:
    """Measures the CPU seconds of all helpers, ended and running, since this object was created.
    Use from one thread only."""

    def __init__(self) -> None:
        self._filter = HelperFilter()
        self._start_s = _reaped_s()
        self._total_s = 0.0

    def read(self) -> tuple[float, dict[str, float]]:
        """Return the total, which never decreases, and the CPU seconds of running helpers by name.
        Raises OSError if /proc cannot be read."""
        # Read the reaped helpers first: one that is reaped in between is then missing from one
        # reading rather than counted twice.
        ended_s = _reaped_s() - self._start_s
        running: dict[str, float] = {}
        for process, helper in self._filter.judge(_children()).items():
            if helper and (used_s := _used_s(process.pid)) is not None:
                name = _name(process.pid)
                running[name] = running.get(name, 0.0) + used_s
        self._total_s = max(self._total_s, ended_s + sum(running.values()))
        return self._total_s, running


def let_outlive(pid: int) -> None:
    """Keep `end_helpers` from killing this helper. It writes the guard's last lines and exits on
    its own soon after the guard."""
    _outliving.add(pid)


def end_helpers(within_s: float) -> None:
    """Kill any remaining helpers. Returns when they are gone, or after `within_s` seconds.

    Each monitor, probe and sender ends its own helper. But a thread may start one just after the
    helper's owner has stopped, and nothing else would end that helper. Never touches the miner's
    processes.
    """
    helpers = HelperFilter()
    deadline = time.monotonic() + within_s
    while _any_after_killing(helpers) and time.monotonic() < deadline:
        time.sleep(0.01)


def _any_after_killing(helpers: HelperFilter) -> bool:
    """Kill all helpers; return True if there were any. A child between fork and exec counts too: it
    is still a copy of the guard and may become a helper."""
    living = [seen for seen in _children() if seen.lives]
    for seen in living:
        if seen.process.pid in _outliving:
            # A suspended helper would not exit until someone resumes it.
            processes.send(seen.process, signal.SIGCONT)
    judged = helpers.judge([seen for seen in living if seen.process.pid not in _outliving])
    for process, helper in judged.items():
        if helper:
            processes.send(process, signal.SIGKILL)
    return any(helper is not False for helper in judged.values())


def _reaped_s() -> float:
    """CPU seconds of the children that this process has reaped, except the miner's processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime - _miners_reaped_s


def _children() -> list[Stat]:
    """The children that any thread of this process started, except those that have vanished."""
    own = os.getpid()
    found: set[int] = set()
    try:
        for thread in os.listdir(f"/proc/{own}/task"):
            found |= processes.children_of_thread(own, int(thread))
    except FileNotFoundError:
        # A thread ended, or this kernel was built without CONFIG_PROC_CHILDREN.
        return [seen for seen in processes.table().values() if seen.parent == own]
    return [seen for pid in found if (seen := processes.stat(pid)) is not None]


def _used_s(pid: int) -> float | None:
    """CPU seconds of a process and of the children that it has reaped; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return sum(map(int, fields[11:15])) / _TICKS_PER_S


def _name(pid: int) -> str:
    """A process's module with its package (`show.http`), or the name of its command if
    it runs no module."""
    words = processes.command(pid).split()
    if "-m" in words[:-1]:
        return ".".join(words[words.index("-m") + 1].split(".")[-2:])
    return words[0].rpartition("/")[2] if words else "unknown"
