"""run.json: the processes of the current run by pid and start time, and its cgroup, for the guard
after a killed one.

Most processes can also be found by the marker in their environment; one that shed its environment
is only found here.
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
class Left:
    """What an earlier guard left behind, by its list."""

    processes: frozenset[Process]
    cgroups: tuple[Cgroup, ...]


class PidRegistry:
    """Writes the list when it changes. A disk that refuses costs this list only; parentage and the
    marker still work."""

    def __init__(self, state: StateDir) -> None:
        self._path = state.roster

    def write(self, run: frozenset[Process], cgroup: Cgroup | None = None) -> None:
        """Remember the run's living processes."""
        listed = sorted([process.pid, process.start] for process in run)
        path = None if cgroup is None else str(cgroup.path)
        # Refused: the list changes again, and is then written whole.
        with contextlib.suppress(OSError):
            write_json(self._path, {"boot": boot_id() or "", "cgroup": path, "processes": listed})


def left_behind(state: StateDir) -> Left:
    """What still lives of the last list."""
    cgroups = {group.path: group for group in Cgroup.beside(str(state.root))}
    document = read_json(state.roster)
    if not isinstance(document, dict) or document.get("boot") != (boot_id() or ""):
        return Left(frozenset(), tuple(cgroups.values()))
    if (named := Cgroup.of_earlier_guard(document.get("cgroup"))) is not None:
        cgroups[named.path] = named
    try:
        listed = {Process(int(pid), int(start)) for pid, start in document["processes"]}
    except (KeyError, TypeError, ValueError):
        listed = set()
    living = frozenset(process for process in listed if processes.alive(process))
    return Left(living, tuple(cgroups.values()))
