"""What an earlier guard of the same state directory left behind is ended before anything is
started."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.state_dir import StateDir
from miner_guard.supervisor.process.pid_registry import PidRegistry
from miner_guard.system import processes
from miner_guard.system.processes import Process

_GIVE_UP_AFTER_S = 8.0


def end_orphans(state: StateDir, grace_s: float, report: Callable[[Finding], None]) -> None:
    """End every process of an earlier run.

    They get SIGTERM and up to `grace_s` to write their checkpoints, then SIGKILL. Found by the
    marker in their environment together with this state directory, or in the list that the earlier
    guard kept; never by name.
    """
    spared = processes.ancestors(os.getpid())
    left = _left(state, spared)
    if not left:
        return
    commands = {process: processes.command(process.pid) for process in left}
    for process in left:
        processes.send(process, signal.SIGTERM)
        processes.send(process, signal.SIGCONT)
    remaining = _wait(state, spared, grace_s)
    deadline = time.monotonic() + _GIVE_UP_AFTER_S
    while remaining and time.monotonic() < deadline:
        for process in remaining:
            processes.send(process, signal.SIGKILL)
        remaining = _wait(state, spared, 0.1)
    for process, run in left.items():
        report(
            make_finding("orphan_killed", pid=process.pid, command=commands[process], of_run=run)
        )


def _left(state: StateDir, spared: set[int]) -> dict[Process, str]:
    listed = dict.fromkeys(PidRegistry(state).left(), "an earlier guard's list")
    return {
        p: run
        for p, run in {**listed, **processes.marked(str(state.root))}.items()
        if p.pid not in spared
    }


def _wait(state: StateDir, spared: set[int], seconds: float) -> dict[Process, str]:
    deadline = time.monotonic() + seconds
    while (left := _left(state, spared)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
