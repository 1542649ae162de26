"""Ensures one guard per state directory, with a lock that the kernel releases however its holder
dies."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from miner_guard.guard.state_dir_check import set_aside_foreign, wrong_kind
from miner_guard.guard.states import State
from miner_guard.record.events import Event, degraded, event
from miner_guard.record.store import RunReader
from miner_guard.record.words import known
from miner_guard.state_dir import StateDir, is_at, make_folder, open_private
from miner_guard.system.processes import boot_id

_JUST_ASKED_S = 1.0
"""How long to wait for a holder that has not recorded that it is stopping: it may only just have
received its signal."""


class LockHeld(Exception):
    """The lock can't be acquired; the message names the state directory and the holder."""


@dataclass(frozen=True)
class Holder:
    """The run that holds the lock, as described by the lock file. `pid` is its keeper's."""

    pid: int | None
    stopping: bool
    stop_timeout_s: float
    boot: str | None = None


class Lock:
    """The lock on one state directory."""

    def __init__(self, state: StateDir, stop_timeout_s: float, keeper_pid: int) -> None:
        self._state = state
        self._stop_timeout_s = stop_timeout_s
        self._keeper_pid = keeper_pid
        self._fd: int | None = None
        self.last_boot: str | None = None
        """The kernel's id of the boot in which the lock was last held."""

        self._stopping = self._lost = False
        self.hand_over: Callable[[int], None] = lambda _fd: None
        """Called with each descriptor that comes to hold the lock."""

        self.events: list[Event] = []
        """Events about the lock file, for the caller to log as soon as it has a log."""

    def acquire(self, held: int | None = None) -> None:
        """Acquire the lock; `held` is a descriptor that already holds it, from an earlier guard of
        the same keeper. If its holder is stopping, wait up to the holder's stop timeout plus
        5 s. Raises LockHeld."""
        if held is not None:
            self._fd = held
            if not self.lost():
                return
            os.close(held)
            self._fd = None
        waited = 0.0
        while True:
            try:
                fd = self._open()
                # Reject a lock file that someone removed after this process opened it: locking it
                # protects nothing.
                if _try(fd) and is_at(self._state.lock, fd):
                    break
            except OSError as error:
                raise LockHeld(
                    f"cannot write to state directory {self._state.root}: {error.strerror}; "
                    "make it writable, or choose another directory with --state-dir"
                ) from error
            holder = _holder(fd)
            os.close(fd)
            limit = holder.stop_timeout_s + 5.0 if holder.stopping else _JUST_ASKED_S
            if waited >= limit:
                doing = "is still stopping" if holder.stopping else "is running"
                raise LockHeld(
                    f"state directory {self._state.root} is in use: the guard with pid "
                    f"{holder.pid or 'unknown'} {doing} there; stop it, or choose another "
                    "directory with --name or --state-dir"
                )
            time.sleep(0.05)
            waited += 0.05
        self._fd = fd
        self.last_boot = _holder(fd).boot
        self._write()
        self.hand_over(fd)

    def lost(self) -> bool:
        """Return True if someone removed or replaced the lock file; False also if this cannot be
        determined."""
        try:
            return self._fd is not None and not is_at(self._state.lock, self._fd)
        except OSError:
            return False

    def keep(self) -> Event | None:
        """Recreate the lock file if someone removed it. Returns an event the first time this
        fails."""
        try:
            if self._fd is None or is_at(self._state.lock, self._fd):
                return None
            make_folder(self._state.root)
            fd = self._file()
        except OSError as error:
            return self._report_lost(
                f"recreating it failed ({error.strerror}), so a second guard could start here"
            )
        if not _try(fd):
            holder = _holder(fd)
            os.close(fd)
            # Some network file systems change a file's inode number; this is still the guard's own
            # lock.
            if holder.pid == self._keeper_pid:
                return None
            pid = holder.pid or "unknown"
            return self._report_lost(
                f"the guard with pid {pid} now holds the lock, so two guards are running "
                "here; stop one"
            )
        os.close(self._fd)
        self._fd = fd
        self._write()
        self.hand_over(fd)
        return None

    def _report_lost(self, what: str) -> Event | None:
        if self._lost:
            return None
        self._lost = True
        return degraded(f"{self._state.lock} was removed; {what}")

    def _open(self) -> int:
        make_folder(self._state.root)
        # Let only one guard at a time do this: a second one must not set aside the lock file that
        # the first has just created.
        folder = os.open(self._state.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            # Set the file aside only if its type is wrong. A permission error may mean that it
            # belongs to another user's guard.
            reason = wrong_kind(self._state.lock, stat.S_IFREG)
            if reason is not None:
                self.events.append(set_aside_foreign(self._state.lock, reason))
            return self._file()
        finally:
            os.close(folder)

    def _file(self) -> int:
        return open_private(self._state.lock, os.O_RDWR | os.O_CREAT)

    def stopping(self, overwrite: Callable[[Path, bytes], None]) -> None:
        """Record in the lock file that this guard is stopping, so that a second guard waits for it.
        `overwrite(path, data)` must not wait for the disk."""
        self._stopping = True
        if self._fd is not None:
            overwrite(self._state.lock, self._content())

    def release(self) -> None:
        """Release the lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _content(self) -> bytes:
        says = {
            "pid": self._keeper_pid,
            "boot": boot_id(),
            "stopping": self._stopping,
            "stop_timeout_s": self._stop_timeout_s,
        }
        return json.dumps(says).encode().ljust(256) + b"\n"

    def _write(self) -> None:
        if self._fd is None:
            return
        # If the disk is full, a second guard does not learn that it should wait, but the lock still
        # keeps it out.
        with contextlib.suppress(OSError):
            content = self._content()
            os.pwrite(self._fd, content, 0)
            os.ftruncate(self._fd, len(content))


def _try(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(fd: int) -> Holder:
    try:
        says = json.loads(os.pread(fd, 4096, 0))
        return Holder(
            int(says["pid"]),
            bool(says["stopping"]),
            float(says["stop_timeout_s"]),
            says.get("boot"),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return Holder(None, False, 0.0)


def killed_guard(state: StateDir, last_boot: str | None) -> Iterator[Event]:
    """Yield an event if the last guard to use this state directory did not shut down cleanly.

    Call this while holding the lock: by then the last guard is gone, so its status is `done` unless
    something killed that guard or its last write failed."""
    status = RunReader(state.db).now()
    if status.get("state") in (None, State.DONE.value):
        return
    restarted = bool(last_boot) and last_boot != boot_id()
    why = "the host restarted" if restarted else "killed by SIGKILL or the OOM killer"
    seen = status.get("updated")
    pid = status.get("keeper_pid")
    yield event(
        "guard_killed",
        "warning",
        f"GUARD KILLED: the previous guard (pid {known(pid)}, last status {known(seen)}) did not "
        f"shut down cleanly: {why}",
        pid=pid,
        seen=seen,
        why=why,
    )
