"""run.json: the processes of the current run by pid and start time, and its cgroup, for the guard
after a killed one.

Most processes can also be found by the marker in their environment; one that shed its environment
is only found here.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Any

from miner_guard.state_dir import StateDir, read_json, write_json
from miner_guard.system import processes
from miner_guard.system.boot import boot_id
from miner_guard.system.cgroup import Cgroup
from miner_guard.system.processes import Process

_CLOSE_S = 1.0
"""For a last list that is being written; a dead disk must not hold up the end."""


@dataclass(frozen=True)
class Left:
    """What an earlier guard left behind, by its list."""

    processes: frozenset[Process]
    cgroup: Cgroup | None


class PidRegistry:
    """Writes the list from a thread of its own: the disk may hang, the supervisor may not.

    A disk that refuses costs this list only; parentage and the marker still work.
    """

    def __init__(self, state: StateDir) -> None:
        self._path = state.roster
        self._changed = threading.Condition()
        self._latest: dict[str, Any] | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def write(self, run: frozenset[Process], cgroup: Cgroup | None = None) -> None:
        """Remember the run's living processes. Never blocks; of several lists the last one is
        written."""
        listed = sorted([process.pid, process.start] for process in run)
        path = None if cgroup is None else str(cgroup.path)
        with self._changed:
            self._latest = {"boot": (boot_id() or ""), "cgroup": path, "processes": listed}
            self._changed.notify()
        if self._thread is None:
            thread = threading.Thread(target=self._keep_writing, name="run.json", daemon=True)
            # At the limit of threads the next list tries again.
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread

    def _keep_writing(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._latest is not None or self._closed)
                document, self._latest = self._latest, None
            if document is None:
                return
            # Refused (a full disk): the list changes again, and is then written whole.
            with contextlib.suppress(OSError):
                write_json(self._path, document)

    def close(self) -> None:
        """Write what is pending, as far as the disk lets it."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)


def left_behind(state: StateDir) -> Left:
    """What still lives of the last list."""
    document = read_json(state.roster)
    if not isinstance(document, dict) or document.get("boot") != (boot_id() or ""):
        return Left(frozenset(), None)
    cgroup = Cgroup.of_earlier_guard(document.get("cgroup"))
    try:
        listed = {Process(int(pid), int(start)) for pid, start in document["processes"]}
    except (KeyError, TypeError, ValueError):
        listed = set()
    return Left(frozenset(process for process in listed if processes.alive(process)), cgroup)
