"""One guard per state directory, private to its user, and what an earlier guard left there.

The kernel releases the lock however its holders die. Keeper and guard share one descriptor, so it
outlives each guard.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from miner_guard.guard.states import State
from miner_guard.keeper.teardown import MAX_NAMED, end_at_once
from miner_guard.record.events import Event, degraded, event
from miner_guard.record.store import RunReader
from miner_guard.record.words import or_unknown
from miner_guard.state_dir import (
    PRIVATE_FOLDER,
    StateDir,
    is_at,
    make_folder,
    open_private,
    tighten,
)
from miner_guard.system import processes
from miner_guard.system.clock import Once
from miner_guard.system.processes import Process, boot_id

WAIT_S = 10.0
"""How long to wait for a holder, which may be about to exit: after a SIGKILL of its keeper, a guard
still ends its miner."""

LEAVING_S = 60.0
"""The same for a holder that is known to be: the miner may take its time for a checkpoint. The
refusal would be final, because service managers do not start again what exits with its code."""

_LEAVING = {each.value for each in (State.STOPPING, State.ENDING, State.DONE)}


class LockHeld(Exception):
    """The lock can't be acquired; the message names the state directory and the holder."""


def acquire(state: StateDir, keeper_pid: int) -> tuple[int, str | None]:
    """Lock a state directory, which is created if it does not exist. Returns the descriptor that
    holds the lock, and the kernel's id of the boot in which it was last held. Raises LockHeld."""
    began = time.monotonic()
    while True:
        try:
            make_folder(state.root)
            fd = open_private(state.lock, os.O_RDWR | os.O_CREAT)
            holder = _holder(fd)
            # A lock file that someone removed after this process opened it protects nothing.
            if _try(fd) and is_at(state.lock, fd):
                break
        except OSError as error:
            raise LockHeld(
                f"cannot write to state directory {state.root}: {error.strerror}; "
                "make it writable, or choose another directory with --state-dir"
            ) from error
        os.close(fd)
        waited = time.monotonic() - began
        if waited >= WAIT_S and not (waited < LEAVING_S and _is_leaving(state, holder)):
            raise LockHeld(
                f"state directory {state.root} is in use: the guard with pid "
                f"{holder.get('pid') or 'unknown'} is running there; stop it, or choose another "
                "directory with --name or --state-dir"
            )
        time.sleep(0.05)
    # On a full disk, a second guard does not learn the pid, but the lock still keeps it out.
    with contextlib.suppress(OSError):
        content = json.dumps({"pid": keeper_pid, "boot": boot_id()}).encode() + b"\n"
        os.pwrite(fd, content, 0)
        os.ftruncate(fd, len(content))
    return fd, holder.get("boot")


def _is_leaving(state: StateDir, holder: Mapping[str, Any]) -> bool:
    """Whether the guard is stopping, or the process that was started is gone."""
    pid = holder.get("pid")
    gone = isinstance(pid, int) and not processes.exists(pid)
    return gone or RunReader(state.db).now().get("state") in _LEAVING


def _try(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(fd: int) -> dict[str, Any]:
    try:
        holder = json.loads(os.pread(fd, 4096, 0))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def make_private(state: StateDir) -> Iterator[Event]:
    """Close the state directory to other users, whatever the modes of the files in it. Yields what
    there is to report."""
    try:
        fd = os.open(state.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_mode & stat.S_ISVTX:
                raise OSError(errno.EPERM, "it is shared by the users of this host (sticky)")
            before = tighten(fd, PRIVATE_FOLDER)
        finally:
            os.close(fd)
    except OSError as error:
        what = f"other users can read {state.root}: {error.strerror}"
        yield degraded(f"{what}; use --state-dir to choose a directory that this user owns")
        return
    if before is not None:
        mode = f"{before:04o}"
        text = f"STATE DIRECTORY TIGHTENED: {state.root} was open to other users (mode {mode})"
        yield event("guard_degraded", "info", f"{text}, now 0700", what=str(state.root), mode=mode)


def killed_guard(state: StateDir, last_boot: str | None) -> Iterator[Event]:
    """Yield an event if the last guard to use this state directory did not shut down cleanly.

    Call this while holding the lock: by then the last guard is gone, so its status is `done` unless
    something killed that guard or its last write failed."""
    status = RunReader(state.db).now()
    if status.get("state") in (None, State.DONE.value):
        return
    restarted = bool(last_boot) and last_boot != boot_id()
    why = "the host restarted" if restarted else "killed by SIGKILL or the OOM killer"
    updated, pid = status.get("updated"), status.get("keeper_pid")
    who = f"the previous guard (pid {or_unknown(pid)}, last status {or_unknown(updated)})"
    text = f"GUARD KILLED: {who} did not shut down cleanly: {why}"
    yield event("guard_killed", "warning", text, pid=pid, seen=updated, why=why)


_GRACE_S = 5.0
"""Time for the checkpoints of an earlier run's orphans."""


def orphans_killed(run_id: str, killed: Sequence[tuple[int, str]], count: int) -> Iterator[Event]:
    """Yield one event per process, as (pid, command line), up to a limit, then one that counts
    the rest of `count`."""
    lines = [(pid, f"pid {pid} ({command})", command) for pid, command in killed[:MAX_NAMED]]
    if count > MAX_NAMED:
        rest = f"{count - MAX_NAMED} more"
        lines.append((killed[MAX_NAMED][0], rest, rest))
    for pid, what, command in lines:
        text = f"ORPHAN KILLED: {what} of run {run_id}"
        yield event("orphan_killed", "warning", text, pid=pid, command=command, of_run=run_id)


def end_orphans(state: StateDir, report: Callable[[Event], None]) -> None:
    """End every process of an earlier run in this state directory, never by its name."""
    ended = end_marked(state, grace_s=_GRACE_S)
    killed = [(process.pid, command) for process, command in ended.items()]
    for each in orphans_killed("an earlier guard", killed, len(killed)):
        report(each)


def end_marked(
    state: StateDir, listed: Collection[Process] = (), *, grace_s: float
) -> dict[Process, str]:
    """End the processes of runs in this state directory, whose lock this guard holds: those listed,
    those with a run's marker in their environment, and the descendants of both. Returns what was
    found, with the command lines."""
    place, spared = str(state.root), processes.ancestors(os.getpid())
    tracked = {each.pid: each for each in listed}
    first = Once()

    def look() -> Collection[Process]:
        table = processes.table()
        roots = {
            pid for pid, each in tracked.items() if pid in table and table[pid].process == each
        }
        members = processes.descendants(roots - spared, table)
        if first.first() or not members:
            # This reads every environment of this user's processes.
            members |= processes.descendants(processes.marked(place, table) - spared, table)
        tracked.update((each.pid, each) for each in members)
        return [each for each in members if each.pid not in spared]

    return end_at_once(look, grace_s)
