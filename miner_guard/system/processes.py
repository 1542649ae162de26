"""Inspects processes through /proc (identity, parents, children) and signals a single one.

A pid and its start time together identify a process, so that the guard never signals a process that
has reused the pid.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from miner_guard.state_dir import MARKER, STATE_DIR

_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""Errors that mean a process has exited or belongs to another user. Functions here raise any other
error (such as EMFILE), because failing to inspect a process does not prove that it exited."""

HELPER = "_MINER_GUARD_HELPER"
"""Environment variable that marks the guard's own helpers, such as probes. A process with it
never belongs to a run."""


def signal_name(number: int) -> str:
    """The name of a signal, such as `SIGKILL`; its number if it is a real-time signal without a
    name."""
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
    """The fields of /proc/PID/stat that the guard uses."""

    process: Process
    name: str
    state: str
    """R running, S sleeping, D uninterruptible, T stopped, Z zombie."""

    parent: int

    @property
    def lives(self) -> bool:
        """Whether the process is still running. A zombie is not; it is waiting to be reaped."""
        return self.state not in "ZX"


Table = Mapping[int, Stat]
"""All processes in this namespace by pid, from one pass through /proc."""


def stat(pid: int) -> Stat | None:
    """Read /proc/PID/stat; None if the process does not exist. Raises OSError if it cannot be
    read."""
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
    """Read all processes in one pass through /proc. Raises OSError if /proc cannot be read."""
    return {pid: entry for pid in pids() if (entry := stat(pid)) is not None}


def hidden_children(among: Table) -> set[int]:
    """This process's children that /proc hides: under `hidepid`, those of another user."""
    child_pids: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children", "rb") as file:
                child_pids.update(map(int, file.read().split()))
    return child_pids - among.keys()


def descendants(roots: Iterable[int], among: Table) -> set[Process]:
    """Return the live processes among `roots` and their descendants, including the children of
    zombies."""
    below: dict[int, list[int]] = {}
    for pid, entry in among.items():
        below.setdefault(entry.parent, []).append(pid)
    members: set[Process] = set()
    passed: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid in passed:
            continue
        passed.add(pid)
        if pid in among and among[pid].lives:
            members.add(among[pid].process)
        waiting += below.get(pid, ())
    return members


def exists(pid: int) -> bool:
    """Whether there is a process with this pid, even if /proc hides it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def alive(process: Process) -> bool:
    """Return True if the process is still running; a zombie is not."""
    entry = stat(process.pid)
    if entry is None:
        return exists(process.pid)
    return entry.process == process and entry.lives


def environment(pid: int) -> dict[str, str]:
    """The environment that the process had when it started its program; empty if it cannot be
    read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except _GONE:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def command(pid: int) -> str:
    """The process's command line, truncated to 200 characters; empty if it cannot be read."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()[:200]


def pids() -> Iterator[int]:
    """Every pid in this namespace."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


_MARK = MARKER.encode() + b"="
_PLACED = re.compile(rb"(?:^|\0)%b=([^\0]*)" % STATE_DIR.encode())


def marked(state_dir: str, among: Table) -> set[int]:
    """The pids of live processes that a guard started that used this state directory.

    It reads the environment of each of this user's processes, 0.3 ms each, so do not call it in
    a loop.
    """
    matching: set[int] = set()
    for pid, entry in among.items():
        # The kernel may hold the lock on a blocked process's environment; reading it would block
        # the guard.
        if entry.state in "ZXD":
            continue
        try:
            with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
                raw = file.readall()
        except _GONE:
            continue
        # Parse only what is needed: there may be thousands of marked processes.
        if _MARK not in raw or HELPER.encode() in raw or (place := _PLACED.search(raw)) is None:
            continue
        # Compare real paths too: an earlier guard may have been given a symlink to the same
        # directory.
        directory = os.fsdecode(place[1])
        if directory == state_dir or os.path.realpath(directory) == state_dir:
            matching.add(pid)
    return matching


def ancestors(pid: int) -> set[int]:
    """`pid` and all its ancestors."""
    chain: set[int] = set()
    while pid > 0 and pid not in chain:
        chain.add(pid)
        entry = stat(pid)
        pid = entry.parent if entry is not None else 0
    return chain


def catches(pid: int, number: int) -> bool:
    """Return True if the process has a handler for signal `number`; False if that cannot be read.
    A process without a handler dies from most signals."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            masks = [int(line.split()[1], 16) for line in status if line.startswith(b"SigCgt:")]
    except OSError:
        return False
    return bool(masks) and bool(masks[0] >> (number - 1) & 1)


def send(process: Process, *numbers: int) -> bool:
    """Send these signals to exactly this process. Returns False if it is gone or belongs to another
    user. Raises OSError if that cannot be determined."""
    handle = _handle(process.pid)
    try:
        entry = stat(process.pid)
        # The pid of a child is nobody else's until it is reaped.
        hidden = entry is None and process.pid in hidden_children({})
        if not hidden and (entry is None or entry.process != process):
            return False
        for number in numbers:
            if handle is None:
                # This hits another process only if the pid is reused between the check and the
                # signal, which requires the kernel's pid counter to wrap around.
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
    """Open a pidfd: a signal through it cannot hit a later process that reuses the pid. None if
    the process is gone, or if this kernel (before 5.3) or container (an old seccomp profile: EPERM)
    offers no pidfds."""
    with contextlib.suppress(AttributeError, OSError):
        return os.pidfd_open(pid)
    return None


def boot_id() -> str | None:
    """Return the kernel's id for the current boot, or None if it is unreadable. The id
    distinguishes machines that have the same host name, as containers often do."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
