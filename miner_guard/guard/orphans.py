"""Reports the processes that had to be ended, and ends those of an earlier run whose keeper, guard
and deputy were all killed at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from miner_guard.keeper.deputy import Run, end_run
from miner_guard.keeper.teardown import MAX_NAMED
from miner_guard.record.events import Event, event
from miner_guard.state_dir import StateDir
from miner_guard.system.processes import Cgroup

_GRACE_S = 5.0
"""Time for the orphans' checkpoints."""


def orphans_killed(run_id: str, killed: Sequence[tuple[int, str]], count: int) -> Iterator[Event]:
    """Yield one event per process, as (pid, command line), up to a limit, then one that counts
    the rest of `count`."""
    lines = [*killed[:MAX_NAMED]]
    if count > MAX_NAMED:
        lines.append((killed[MAX_NAMED][0], f"and {count - MAX_NAMED - 1} more"))
    for pid, command in lines:
        yield event(
            "orphan_killed",
            "warning",
            f"ORPHAN KILLED: pid {pid} ({command}) of run {run_id}",
            pid=pid,
            command=command,
            of_run=run_id,
        )


def end_orphans(state: StateDir, report: Callable[[Event], None]) -> None:
    """End every process of an earlier run in this state directory, never by its name."""
    groups = [str(group.path) for group in Cgroup.beside(str(state.root))]
    found = end_run(Run(str(state.root), None, groups), _GRACE_S)
    killed = [(process.pid, command) for process, command in found.items()]
    for each in orphans_killed("an earlier guard", killed, len(killed)):
        report(each)
