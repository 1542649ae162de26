"""Kills processes left behind by an earlier guard that used this state directory, before this guard
starts any. To find them, each guard lists its run's processes and its cgroup in run.json."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from miner_guard.guard.teardown import orphans_killed
from miner_guard.record.events import Event
from miner_guard.state_dir import StateDir, read_json, write_json
from miner_guard.system import processes
from miner_guard.system.cgroup import Cgroup
from miner_guard.system.processes import Process, boot_id


@dataclass(frozen=True)
class LeftBehind:
    """Processes and cgroups that an earlier guard listed."""

    processes: frozenset[Process]
    cgroups: tuple[Cgroup, ...]


class PidRegistry:
    """Writes run.json. If a write fails, only this list is lost; a search by parent process or by
    marker still works."""

    def __init__(self, state: StateDir) -> None:
        self._path = state.pid_registry

    def write(self, run: frozenset[Process], cgroup: Cgroup | None = None) -> None:
        """Store the run's live processes."""
        listed = sorted([process.pid, process.start] for process in run)
        path = None if cgroup is None else str(cgroup.path)
        # Ignore a failed write: the next one writes the whole list.
        with contextlib.suppress(OSError):
            write_json(self._path, {"boot": boot_id() or "", "cgroup": path, "processes": listed})


def left_behind(state: StateDir) -> LeftBehind:
    """The processes in the last list that are still alive, and the cgroups of earlier guards."""
    cgroups = {group.path: group for group in Cgroup.beside(str(state.root))}
    document = read_json(state.pid_registry)
    if not isinstance(document, dict) or document.get("boot") != (boot_id() or ""):
        return LeftBehind(frozenset(), tuple(cgroups.values()))
    if (named := Cgroup.of_earlier_guard(document.get("cgroup"))) is not None:
        cgroups[named.path] = named
    try:
        listed = {Process(int(pid), int(start)) for pid, start in document["processes"]}
    except (KeyError, TypeError, ValueError):
        listed = set()
    living = frozenset(process for process in listed if processes.alive(process))
    return LeftBehind(living, tuple(cgroups.values()))


_GIVE_UP_AFTER_S = 8.0
_LOOK_EVERY_S = 0.05
_LIST = "unknown (listed by an earlier guard)"


def end_orphans(state: StateDir, grace_s: float, report: Callable[[Event], None]) -> None:
    """End every process of an earlier run.

    They get SIGTERM and up to `grace_s` to write their checkpoints, then SIGKILL. The search finds
    the processes in the earlier guard's list and cgroup, the descendants of both, and every process
    whose environment marker names this state directory. It never goes by process names.
    """
    search = _Search(state)
    if left := search.living():
        commands = {process: processes.command(process.pid) for process in left}
        for process in left:
            processes.send(process, signal.SIGTERM, signal.SIGCONT)
        remaining = search.wait(grace_s)
        deadline = time.monotonic() + _GIVE_UP_AFTER_S
        while remaining and time.monotonic() < deadline:
            for group in search.cgroups:
                group.kill()
            for process in remaining:
                processes.send(process, signal.SIGKILL)
            remaining = search.wait(2 * _LOOK_EVERY_S)
        for event in orphans_killed(
            (process, commands[process], run) for process, run in left.items()
        ):
            report(event)
    for group in search.cgroups:
        group.remove()


class _Search:
    """Finds the earlier run's live processes, including any that they start during the
    cleanup."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self._spared = processes.ancestors(os.getpid())
        left = left_behind(state)
        self.cgroups: tuple[Cgroup, ...] = left.cgroups
        self._runs: dict[Process, str] = dict.fromkeys(left.processes, _LIST)

    def living(self) -> dict[Process, str]:
        """Live processes, each with the id of its run, or `_LIST` if its environment contains no
        run id."""
        table = processes.table()
        roots = {p.pid for p in self._runs if p.pid in table and table[p.pid].process == p}
        for group in self.cgroups:
            roots |= group.pids()
        self._runs = dict.fromkeys(processes.descendants(roots - self._spared, table), _LIST)
        self._runs |= processes.marked(str(self._state.root), table)
        self._runs = {
            process: run for process, run in self._runs.items() if process.pid not in self._spared
        }
        return self._runs

    def wait(self, seconds: float) -> dict[Process, str]:
        """Wait up to `seconds` for the processes to exit; returns those that are still alive."""
        deadline = time.monotonic() + seconds
        while (left := self.living()) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        return left
