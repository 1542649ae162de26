"""Reports the processes that had to be ended, and ends those of a run that has lost its keeper and
the process in front of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence

from miner_guard.keeper.teardown import MAX_NAMED, end_at_once
from miner_guard.record.events import Event, event
from miner_guard.state_dir import StateDir
from miner_guard.system import processes
from miner_guard.system.clock import Once
from miner_guard.system.processes import Process

_GRACE_S = 5.0
"""Time for the checkpoints of an earlier run's orphans."""


def orphans_killed(run_id: str, killed: Sequence[tuple[int, str]], count: int) -> Iterator[Event]:
    """Yield one event per process, as (pid, command line), up to a limit, then one that counts
    the rest of `count`."""
    lines = [(pid, f"pid {pid} ({command})", command) for pid, command in killed[:MAX_NAMED]]
    if count > MAX_NAMED:
        rest = f"{count - MAX_NAMED} more"
        lines.append((killed[MAX_NAMED][0], rest, rest))
    for pid, what, command in lines:
        text = f"ORPHAN KILLED: {what} of run {run_id}"
        yield event("orphan_killed", "warning", text, pid=pid, command=command, of_run=run_id)


def end_orphans(state: StateDir, report: Callable[[Event], None]) -> None:
    """End every process of an earlier run in this state directory, never by its name."""
    ended = end_marked(state, grace_s=_GRACE_S)
    killed = [(process.pid, command) for process, command in ended.items()]
    for each in orphans_killed("an earlier guard", killed, len(killed)):
        report(each)


def end_marked(
    state: StateDir, listed: Collection[Process] = (), *, grace_s: float
) -> dict[Process, str]:
    """End the processes of runs in this state directory, whose lock this guard holds: those listed,
    those with a run's marker in their environment, and the descendants of both. Returns what was
    found, with the command lines."""
    place, spared = str(state.root), processes.ancestors(os.getpid())
    tracked = {each.pid: each for each in listed}
    first = Once()

    def look() -> Collection[Process]:
        table = processes.table()
        roots = {
            pid for pid, each in tracked.items() if pid in table and table[pid].process == each
        }
        members = processes.descendants(roots - spared, table)
        if first.first() or not members:
            # This reads every environment of this user's processes.
            members |= processes.descendants(processes.marked(place, table) - spared, table)
        tracked.update((each.pid, each) for each in members)
        return [each for each in members if each.pid not in spared]

    return end_at_once(look, grace_s)
