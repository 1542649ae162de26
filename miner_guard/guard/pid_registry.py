"""run.json: the current run's processes (pid and start time) and its cgroup. The next guard reads
it if this one is killed.

Most of these processes can also be found by their environment marker; a process that cleared its
environment appears only here.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from miner_guard.state_dir import StateDir, read_json, write_json
from miner_guard.system import processes
from miner_guard.system.boot import boot_id
from miner_guard.system.cgroup import Cgroup
from miner_guard.system.processes import Process


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
