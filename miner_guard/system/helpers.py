"""The guard's helper processes, which are all children of the guard's process: measures their CPU
time, and ends them.

The guard marks its own environment (`processes.HELPER`), which every helper inherits: the keeper
tells by it which orphans are the guard's and which are the miner's.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator

import psutil


class HelperCpu:
    """Measures the CPU seconds of all helpers, ended and running, since this object was created.
    Use from one thread only."""

    def __init__(self) -> None:
        self._start_s = _reaped_s()
        self._total_s = 0.0

    def read(self) -> float:
        """Return the total, which never decreases."""
        # Read the reaped helpers first: one that is reaped in between is then missing from one
        # reading rather than counted twice.
        used_s = _reaped_s() - self._start_s
        for helper in _running():
            with contextlib.suppress(psutil.Error):
                used_s += sum(helper.cpu_times()[:4])
        self._total_s = max(self._total_s, used_s)
        return self._total_s


def end_helpers(within_s: float) -> None:
    """Kill any remaining helpers. Returns when they are gone, or after `within_s` seconds.

    Each monitor, probe and sender ends its own helper. But a thread may start one just after the
    helper's owner has stopped, and nothing else would end that helper.
    """
    deadline = time.monotonic() + within_s
    while (living := list(_running())) and time.monotonic() < deadline:
        for helper in living:
            with contextlib.suppress(psutil.Error):
                helper.kill()
        time.sleep(0.01)


def _reaped_s() -> float:
    """CPU seconds of the children that this process has reaped."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _running() -> Iterator[psutil.Process]:
    """The children that any thread of this process started and that have not ended."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE:
                yield child
