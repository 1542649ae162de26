"""Processes of a run: found by a marker in their environment and by parentage, never by name.

A process is known by its pid and its start time, so that a reused pid is never signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from miner_guard.state_dir import MARKER, STATE_DIR

_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""Of a process that ended, or is another user's. Other errors (no descriptor to look with) say
nothing of it. They are raised: a process that can't be looked at has not ended."""

HELPER = "_MINER_GUARD_HELPER"
"""In the environment of what the guard starts for itself: probes, the reaper. Never part of a
run."""


def signal_name(number: int) -> str:
    """`SIGKILL`; for a real-time signal, which has no name of its own, its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


@dataclass(frozen=True)
class Process:
    """One process, distinguishable from a later one with the same pid."""

    pid: int
    start: int
    """Clock ticks since boot."""


@dataclass(frozen=True)
class Stat:
    """What /proc/PID/stat says."""

    process: Process
    name: str
    state: str
    """R running, S sleeping, D uninterruptible, T stopped, Z zombie."""

    parent: int


def stat(pid: int) -> Stat | None:
    """None where there is no such process. Raises OSError where it can't be looked at."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            head, _, tail = file.read().rpartition(b")")
    except _GONE:
        return None
    fields = tail.split()
    name = head.partition(b"(")[2].decode(errors="replace")
    return Stat(Process(pid, int(fields[19])), name, fields[0].decode(), int(fields[1]))


def alive(process: Process) -> bool:
    """Whether it still runs; a zombie does not."""
    seen = stat(process.pid)
    return seen is not None and seen.process == process and seen.state not in "ZX"


def environment(pid: int) -> dict[str, str]:
    """What its environment was when it was executed; empty where it can't be read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except _GONE:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def command(pid: int) -> str:
    """Its command line, for people; empty where it can't be read."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()[:200]


def pids() -> Iterator[int]:
    """Every pid of this namespace."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def marked(state_dir: str) -> dict[Process, str]:
    """Living processes that a guard of this state directory started, with the run's id of each."""
    needle = f"{MARKER}=".encode()
    found: dict[Process, str] = {}
    for pid in pids():
        try:
            raw = Path(f"/proc/{pid}/environ").read_bytes()
        except _GONE:
            continue
        if needle not in raw or HELPER.encode() in raw:
            continue
        env = environment(pid)
        seen = stat(pid)
        if env.get(STATE_DIR) == state_dir and seen is not None and seen.state not in "ZX":
            found[seen.process] = env.get(MARKER, "")
    return found


def children(pid: int) -> list[int]:
    """Direct children of all its threads."""
    found: list[int] = []
    with contextlib.suppress(*_GONE):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(*_GONE), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def tree(pid: int) -> set[Process]:
    """`pid` and its living descendants."""
    found: set[Process] = set()
    waiting = [pid]
    while waiting:
        current = waiting.pop()
        seen = stat(current)
        if seen is None or seen.process in found:
            continue
        if seen.state not in "ZX":
            found.add(seen.process)
        waiting += children(current)
    return found


def ancestors(pid: int) -> set[int]:
    """`pid` and everything above it."""
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        seen = stat(pid)
        pid = seen.parent if seen is not None else 0
    return found


def adopted(guard: int) -> set[Process]:
    """Children of the guard that it did not start for itself: orphans of the run that came to it as
    subreaper.

    Includes the launcher. A helper between fork and exec still has the guard's own command line; it
    is left out.
    """
    own = command(guard)
    found: set[Process] = set()
    for pid in children(guard):
        seen = stat(pid)
        if seen is None or seen.state in "ZX" or HELPER in environment(pid) or command(pid) == own:
            continue
        found |= tree(pid)
    return found


def send(process: Process, number: int) -> bool:
    """Signal exactly this process. False where it is gone already or not ours. Raises OSError where
    it can't tell."""
    try:
        handle = os.pidfd_open(process.pid)
    except _GONE:
        return False
    try:
        seen = stat(process.pid)
        if seen is None or seen.process != process:
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except _GONE:
        return False
    finally:
        os.close(handle)
