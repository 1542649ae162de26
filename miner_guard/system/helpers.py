"""The guard's helpers: which of its children they are, their CPU time, and their end.

The guard marks its own environment (`processes.HELPER`), so every process that it starts for itself
inherits the mark, and the miner's environment lacks it. CPU time needs no list of helpers: of the
children that the guard has reaped, all but the miner's are its own.
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
"""Helpers that `end_helpers` lets live."""

_miners_reaped_s = 0.0
"""CPU seconds of the miner's processes among those that the kernel counts as reaped children."""


def reap_miners(pid: int) -> int | None:
    """Reap a child that belongs to the miner, without waiting: its wait status, None while it runs.
    Raises ChildProcessError if it was reaped already. One thread."""
    global _miners_reaped_s
    reaped, status, usage = os.wait4(pid, os.WNOHANG)
    if reaped == 0:
        return None
    _miners_reaped_s += usage.ru_utime + usage.ru_stime
    return status


class HelperFilter:
    """Tells helpers from the miner's processes among the guard's children. One thread."""

    def __init__(self) -> None:
        self._own_command = processes.command(os.getpid())
        self._known: Mapping[Process, bool] = {}

    def judge(self, children: Iterable[Stat]) -> dict[Process, bool | None]:
        """Whether each child is a helper; None where that cannot be known (yet). Each
        environment is read once."""
        judged = {seen.process: self._judged(seen) for seen in children}
        self._known = {process: helper for process, helper in judged.items() if helper is not None}
        return judged

    def _judged(self, seen: Stat) -> bool | None:
        known = self._known.get(seen.process)
        # A zombie's environment is gone, and reading that of a process in D state can block on the
        # kernel's lock.
        if known is not None or seen.state in "ZXD":
            return known
        return processes.is_helper(seen.process.pid, self._own_command)


class HelperCpu:
    """CPU seconds of all helpers, ended and running, since this object was made. One thread."""

    def __init__(self) -> None:
        self._filter = HelperFilter()
        self._start_s = _reaped_s()
        self._total_s = 0.0

    def read(self) -> tuple[float, dict[str, float]]:
        """All of it, which never decreases, and that of each running helper by its name. Raises
        OSError if /proc cannot be read."""
        # Before the running ones: a helper reaped in between is missing once, not counted twice.
        ended_s = _reaped_s() - self._start_s
        seen = [stat for pid in _children() if (stat := processes.stat(pid)) is not None]
        running: dict[str, float] = {}
        for process, helper in self._filter.judge(seen).items():
            if helper and (used_s := _used_s(process.pid)) is not None:
                name = _name(process.pid)
                running[name] = running.get(name, 0.0) + used_s
        self._total_s = max(self._total_s, ended_s + sum(running.values()))
        return self._total_s, running


def let_outlive(pid: int) -> None:
    """Keep `end_helpers` from killing this helper, which ends by itself soon after the guard: the
    guard's last lines are its work."""
    _outliving.add(pid)


def end_helpers(within_s: float) -> None:
    """Kill the helpers that are left; returns when they are gone or after `within_s` seconds.

    Each monitor, probe and sender ends its own. But a thread may have been about to start one while
    its owner stopped, and nothing else would end that one before the guard exits. Processes of the
    miner are never touched.
    """
    own_command = processes.command(os.getpid())
    deadline = time.monotonic() + within_s
    while _any_after_killing(own_command) and time.monotonic() < deadline:
        time.sleep(0.01)


def _any_after_killing(own_command: str) -> bool:
    """Whether a helper lived, or may become one: between fork and exec it is a copy of the
    guard."""
    found = False
    for pid in _children():
        seen = processes.stat(pid)
        if seen is None or not seen.lives:
            continue
        if pid in _outliving:
            # Suspended, it would live until it is resumed.
            processes.send(seen.process, signal.SIGCONT)
            continue
        helper = processes.is_helper(pid, own_command)
        if helper:
            processes.send(seen.process, signal.SIGKILL)
        found |= helper is not False
    return found


def _reaped_s() -> float:
    """CPU seconds of this process's reaped children that were not the miner's."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime - _miners_reaped_s


def _children() -> set[int]:
    """The children that any thread of this process started."""
    own = os.getpid()
    found: set[int] = set()
    try:
        for thread in os.listdir(f"/proc/{own}/task"):
            found |= processes.children_of_thread(own, int(thread))
    except FileNotFoundError:
        # A thread ended, or this kernel was built without CONFIG_PROC_CHILDREN.
        found |= {pid for pid, seen in processes.table().items() if seen.parent == own}
    return found


def _used_s(pid: int) -> float | None:
    """CPU seconds of a process and of the children that it has reaped; None once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return sum(map(int, fields[11:15])) / _TICKS_PER_S


def _name(pid: int) -> str:
    """The module that it runs, with its room (`reporting.http_server`), else its command."""
    words = processes.command(pid).split()
    if "-m" in words[:-1]:
        return ".".join(words[words.index("-m") + 1].split(".")[-2:])
    return words[0].rpartition("/")[2] if words else "unknown"
