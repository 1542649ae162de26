"""run.json: the processes of the current run by pid and start time, for the guard that comes after
a killed one.

Most are found by the marker in their environment; one that shed its environment is only found here.
"""

from __future__ import annotations

from pathlib import Path

from miner_guard.state_dir import StateDir, read_json, write_json
from miner_guard.system import processes
from miner_guard.system.processes import Process


def _boot() -> str:
    """Start times count from the boot: a list from an earlier boot means nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class PidRegistry:
    """Writes the list where it changed. A disk that refuses costs this list only; the marker still
    works."""

    def __init__(self, state: StateDir) -> None:
        self._path = state.roster
        self._written: frozenset[Process] = frozenset()

    def write(self, run: frozenset[Process]) -> None:
        """Remember the run's living processes."""
        if run == self._written:
            return
        listed = sorted([process.pid, process.start] for process in run)
        try:
            write_json(self._path, {"boot": _boot(), "processes": listed})
        except OSError:
            return
        self._written = run

    def left(self) -> set[Process]:
        """Those of the last list that still live."""
        document = read_json(self._path)
        if not isinstance(document, dict) or document.get("boot") != _boot():
            return set()
        try:
            listed = {Process(int(pid), int(start)) for pid, start in document["processes"]}
        except (KeyError, TypeError, ValueError):
            return set()
        return {process for process in listed if processes.alive(process)}
