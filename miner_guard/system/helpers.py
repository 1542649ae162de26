"""The guard's helper processes, which are all children of the guard's process: measures their CPU
time, and ends them.

The guard marks its own environment (`processes.HELPER`), which every helper inherits: the keeper
tells by it which orphans are the guard's and which are the miner's.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

from miner_guard.system import processes
from miner_guard.system.processes import Stat

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class HelperCpu:
    """Measures the CPU seconds of all helpers, ended and running, since this object was created.
    Use from one thread only."""

    def __init__(self) -> None:
        self._start_s = _reaped_s()
        self._total_s = 0.0

    def read(self) -> float:
        """Return the total, which never decreases. Raises OSError if /proc cannot be read."""
        # Read the reaped helpers first: one that is reaped in between is then missing from one
        # reading rather than counted twice.
        ended_s = _reaped_s() - self._start_s
        running_s = sum(_used_s(child.process.pid) for child in _children())
        self._total_s = max(self._total_s, ended_s + running_s)
        return self._total_s


def end_helpers(within_s: float) -> None:
    """Kill any remaining helpers. Returns when they are gone, or after `within_s` seconds.

    Each monitor, probe and sender ends its own helper. But a thread may start one just after the
    helper's owner has stopped, and nothing else would end that helper.
    """
    deadline = time.monotonic() + within_s
    while _any_after_killing() and time.monotonic() < deadline:
        time.sleep(0.01)


def _any_after_killing() -> bool:
    """Kill all helpers; return True if there were any."""
    living = [seen for seen in _children() if seen.lives]
    for seen in living:
        processes.send(seen.process, signal.SIGKILL)
    return bool(living)


def _reaped_s() -> float:
    """CPU seconds of the children that this process has reaped."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


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


def _used_s(pid: int) -> float:
    """CPU seconds of a process and of the children that it has reaped; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_S
