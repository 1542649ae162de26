"""Evidence of a hang before any rank has called `init()`: stacks by pid, since no rank is known."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from miner_guard.monitors.evidence import faulthandler, frame_of, spy, wait_for_spy
from miner_guard.state_dir import StateDir
from miner_guard.system import processes
from miner_guard.system.processes import Process

_MAX_PROCESSES = 16
_MAX_NAMED = 4


@dataclass(frozen=True)
class Place:
    """What one of the miner's processes is executing."""

    pid: int
    state: str
    """The process state as in /proc: `T` means stopped."""

    frame: str | None
    """The innermost frame in the miner's code; None without stacks."""


def places(state: StateDir, folder: Path, launcher: int, timeout_s: float) -> list[Place]:
    """Find the code that `launcher` and its Python descendants are executing, and write their
    stacks to `folder`. Processes without children come first. Raises OSError."""
    deadline = time.monotonic() + timeout_s
    among = processes.table()
    tree = processes.descendants([launcher], among)
    parents = {among[process.pid].parent for process in tree}
    # A launcher only waits for its ranks, so processes without children come first.
    ordered = sorted(tree, key=lambda process: (process.pid in parents, process.pid))
    found = []
    for process in _of_python(ordered, state)[:_MAX_PROCESSES]:
        path = folder / f"stacks-pid-{process.pid}.txt"
        seen = processes.stat(process.pid)
        if seen is None:
            continue
        # A stopped process responds to no signal.
        written = seen.state != "T" and _written(state, path, process, deadline)
        if written or seen.state == "T":
            found.append(Place(process.pid, seen.state, frame_of(path) if written else None))
    return found


def _of_python(tree: Iterable[Process], state: StateDir) -> list[Process]:
    return [
        process
        for process in tree
        if state.early_stacks_of(process.pid).exists() or "python" in processes.command(process.pid)
    ]


def _written(state: StateDir, path: Path, process: Process, deadline: float) -> bool:
    """Have the process write its stacks to `path`; if that fails, let py-spy do it. Returns True if
    either succeeded."""
    source = state.early_stacks_of(process.pid)
    if faulthandler(source, path, process) == "faulthandler":
        return True
    child = spy(path, process.pid)
    return child is not None and wait_for_spy(child, deadline) and path.stat().st_size > 0


def described(found: Iterable[Place]) -> str:
    """Describe the source locations for the event's line, such as `train.py:14 (pid 4711)`, and say
    which processes are stopped. Empty if there is nothing to name."""
    rows = [place for place in found if place.frame is not None or place.state == "T"]
    words = []
    for place in rows[:_MAX_NAMED]:
        stopped = "its process is stopped (state T)" if place.state == "T" else ""
        where = " and ".join(filter(None, (place.frame, stopped)))
        words.append(f"{where} (pid {place.pid})")
    return ", ".join(words)
