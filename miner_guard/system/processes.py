"""Processes, as /proc shows them: who they are, whose children, and how to signal exactly one.

A process is known by its pid and its start time, so that a reused pid is never signalled.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from miner_guard.state_dir import MARKER, STATE_DIR

_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""Of a process that ended, or is another user's. Other errors (no descriptor left) prove nothing
and are raised: a process that can't be inspected has not ended."""

HELPER = "_MINER_GUARD_HELPER"
"""In the environment of what the guard starts for itself: probes, the deathwatch. Never part of a
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

    @property
    def lives(self) -> bool:
        """Whether it still runs: a zombie only waits for its parent."""
        return self.state not in "ZX"


Table = Mapping[int, Stat]
"""All processes of this namespace by pid, as one pass through /proc saw them."""


def stat(pid: int) -> Stat | None:
    """None where there is no such process. Raises OSError where it can't be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            raw = file.read(4096)
    except _GONE:
        return None
    head, _, tail = raw.rpartition(b")")
    fields = tail.split(None, 20)
    name = head.partition(b"(")[2].decode(errors="replace")
    return Stat(Process(pid, int(fields[19])), name, fields[0].decode(), int(fields[1]))


def table() -> Table:
    """One pass through /proc. Raises OSError where it can't be read."""
    return {pid: seen for pid in pids() if (seen := stat(pid)) is not None}


def children(pid: int) -> set[int]:
    """Direct children of all its threads. Raises OSError."""
    found: set[int] = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        # A thread that ended.
        with contextlib.suppress(*_GONE), open(f"/proc/{pid}/task/{thread}/children") as file:
            found.update(map(int, file.read().split()))
    return found


def descendants(roots: Iterable[int], among: Table) -> set[Process]:
    """The living processes at and below `roots`; a zombie's children are followed too."""
    below: dict[int, list[int]] = {}
    for pid, seen in among.items():
        below.setdefault(seen.parent, []).append(pid)
    found: set[Process] = set()
    passed: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid in passed:
            continue
        passed.add(pid)
        if pid in among and among[pid].lives:
            found.add(among[pid].process)
        waiting += below.get(pid, ())
    return found


def cpu_s(pid: int) -> float:
    """CPU seconds that `pid` and its living descendants have used so far. Raises OSError where they
    cannot be examined."""
    ticks = 0
    for process in descendants([pid], table()):
        try:
            with open(f"/proc/{process.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except _GONE:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def alive(process: Process) -> bool:
    """Whether it still runs; a zombie does not."""
    seen = stat(process.pid)
    return seen is not None and seen.process == process and seen.lives


def environment(pid: int) -> dict[str, str]:
    """What its environment was when it was executed; empty where it can't be read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except _GONE:
        return {}
    return _parsed(raw)


def _parsed(environ: bytes) -> dict[str, str]:
    pairs = (item.partition(b"=") for item in environ.split(b"\0") if item)
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


def marked(state_dir: str, among: Table | None = None) -> dict[Process, str]:
    """Living processes that a guard of this state directory started, with the run's id of each.

    It reads the environment of every process of this user, 0.3 ms each: for the beginning and the
    end of a search.
    """
    needle = f"{MARKER}=".encode()
    found: dict[Process, str] = {}
    for pid, seen in (table() if among is None else among).items():
        # The environment of a process that waits in the kernel may be locked, and its reader would
        # wait with it.
        if seen.state in "ZXD":
            continue
        try:
            raw = Path(f"/proc/{pid}/environ").read_bytes()
        except _GONE:
            continue
        if needle not in raw or HELPER.encode() in raw:
            continue
        env = _parsed(raw)
        # By its real path: an earlier guard may have been given a symlink to the same directory.
        given = env.get(STATE_DIR)
        if given is not None and (given == state_dir or os.path.realpath(given) == state_dir):
            found[seen.process] = env.get(MARKER, "")
    return found


def ancestors(pid: int) -> set[int]:
    """`pid` and everything above it."""
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        seen = stat(pid)
        pid = seen.parent if seen is not None else 0
    return found


def is_helper(pid: int, guards_command: str) -> bool | None:
    """Whether the guard started this child for itself; None between fork and exec, while it is a
    copy of the guard."""
    if HELPER in environment(pid):
        return True
    return None if command(pid) == guards_command else False


def send(process: Process, number: int) -> bool:
    """Signal exactly this process. False where it is gone already or not ours. Raises OSError where
    it can't tell."""
    handle = _handle(process.pid)
    try:
        seen = stat(process.pid)
        if seen is None or seen.process != process:
            return False
        if handle is None:
            # Between the check and the signal the pid could only be reused after a whole turn of
            # the pid counter.
            os.kill(process.pid, number)
        else:
            signal.pidfd_send_signal(handle, number)
        return True
    except _GONE:
        return False
    finally:
        if handle is not None:
            os.close(handle)


def _handle(pid: int) -> int | None:
    """A pidfd, or None where this kernel (before 5.3) or container (an old seccomp profile: EPERM)
    gives none."""
    if not pidfd_works():
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


@functools.cache
def pidfd_works() -> bool:
    """Whether processes can be signalled without any chance of hitting one that took over the
    pid."""
    try:
        handle = os.pidfd_open(os.getpid())
    except (AttributeError, PermissionError):
        return False
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EINVAL):
            return False
        raise
    try:
        signal.pidfd_send_signal(handle, 0)
    except (AttributeError, OSError):
        return False
    finally:
        os.close(handle)
    return True
