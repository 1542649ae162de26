"""Ends the processes of an earlier run whose keeper, guard and deputy were all killed at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from miner_guard.record.events import Event, event
from miner_guard.state_dir import StateDir
from miner_guard.system import processes
from miner_guard.system.cgroup import Cgroup
from miner_guard.system.processes import Process

_GRACE_S = 5.0
_GIVE_UP_AFTER_S = 8.0
_LOOK_EVERY_S = 0.05
_UNMARKED = "unknown (without the run's marker)"
_MAX_LINES = 50


def orphans_killed(run_id: str, killed: Sequence[tuple[int, str]], count: int) -> Iterator[Event]:
    """Yield one event per process, as (pid, command line), up to a limit, then one that counts
    the rest of `count`."""
    for pid, command in killed[:_MAX_LINES]:
        yield event(
            "orphan_killed",
            "warning",
            f"ORPHAN KILLED: pid {pid} ({command}) of run {run_id}",
            pid=pid,
            command=command,
            of_run=run_id,
        )
    if count > _MAX_LINES:
        pid, more = killed[_MAX_LINES][0], count - _MAX_LINES - 1
        yield event(
            "orphan_killed",
            "warning",
            f"ORPHAN KILLED: pid {pid} (and {more} more) of run {run_id}",
            pid=pid,
            command=f"and {more} more",
            of_run=run_id,
        )


def end_orphans(state: StateDir, report: Callable[[Event], None]) -> None:
    """End every process of an earlier run: those whose environment marker names this state
    directory, the members of that run's cgroup, and the descendants of both. It never goes by
    names. They get SIGTERM and time for their checkpoints, then SIGKILL."""
    cgroups = Cgroup.beside(str(state.root))
    left = _living(state, cgroups)
    if left:
        commands = {process: processes.command(process.pid) for process in left}
        begin = time.monotonic()
        for process in left:
            processes.send(process, signal.SIGTERM, signal.SIGCONT)
        remaining: Mapping[Process, str] = left
        while remaining and (waited := time.monotonic() - begin) < _GRACE_S + _GIVE_UP_AFTER_S:
            if waited >= _GRACE_S:
                for group in cgroups:
                    group.kill()
                for process in remaining:
                    processes.send(process, signal.SIGKILL)
            time.sleep(_LOOK_EVERY_S)
            remaining = _living(state, cgroups)
        for run in sorted(set(left.values())):
            killed = [(each.pid, commands[each]) for each in left if left[each] == run]
            for killed_event in orphans_killed(run, killed, len(killed)):
                report(killed_event)
    for group in cgroups:
        group.remove()


def _living(state: StateDir, cgroups: Sequence[Cgroup]) -> dict[Process, str]:
    """Live processes of earlier runs, each with the id of its run."""
    table, spared = processes.table(), processes.ancestors(os.getpid())
    marked = processes.marked(str(state.root), table)
    roots = {process.pid for process in marked}
    for group in cgroups:
        roots |= group.pids()
    found = dict.fromkeys(processes.descendants(roots - spared, table), _UNMARKED) | marked
    return {process: run for process, run in found.items() if process.pid not in spared}
