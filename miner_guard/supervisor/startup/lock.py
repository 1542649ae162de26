"""One guard per state directory: a lock that the kernel gives back when its holder dies, however it
dies."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.state_dir import StateDir, is_at, make_folder, open_private
from miner_guard.supervisor.startup.state_dir_check import set_aside_foreign, wrong_kind

_JUST_ASKED_S = 1.0
"""A holder that got its signal this moment has not reported yet that it is stopping."""


class LockHeld(Exception):
    """The state directory can't be had; the message names it and the holder."""


@dataclass(frozen=True)
class Holder:
    """What the lock file says of the guard that holds it."""

    pid: int | None
    stopping: bool
    stop_timeout_s: float


class Lock:
    """The lock of one state directory."""

    def __init__(self, state: StateDir, stop_timeout_s: float) -> None:
        self._state = state
        self._stop_timeout_s = stop_timeout_s
        self._fd: int | None = None
        self._stopping = self._lost = False
        self.findings: list[Finding] = []
        """What there is to say of the lock file itself, once there is a log."""

    def acquire(self) -> None:
        """Take the lock; wait for a holder that is stopping, up to its stop timeout. Raises
        Busy."""
        waited = 0.0
        while True:
            try:
                fd = self._open()
                # Not one that was removed while its holder had it: that one guards nothing.
                if _try(fd) and is_at(self._state.lock, fd):
                    break
            except OSError as error:
                raise LockHeld(
                    f"state directory {self._state.root} can't be written: {error.strerror}; "
                    "give another with --state-dir or make it writable"
                ) from error
            holder = _holder(fd)
            os.close(fd)
            limit = holder.stop_timeout_s + 5.0 if holder.stopping else _JUST_ASKED_S
            if waited >= limit:
                doing = "is still stopping" if holder.stopping else "is running"
                raise LockHeld(
                    f"state directory {self._state.root} is in use: the guard with pid "
                    f"{holder.pid or 'unknown'} "
                    f"{doing} there; stop it, or give another with --name or --state-dir"
                )
            time.sleep(0.05)
            waited += 0.05
        self._fd = fd
        self._write()

    def lost(self) -> bool:
        """Whether somebody removed the lock file, as far as can be seen."""
        try:
            return self._fd is not None and not is_at(self._state.lock, self._fd)
        except OSError:
            return False

    def keep(self) -> Finding | None:
        """Take the lock file back where somebody removed it; what there is to say where that can't
        be done, once."""
        try:
            if self._fd is None or is_at(self._state.lock, self._fd):
                return None
            make_folder(self._state.root)
            fd = self._file()
        except OSError as error:
            return self._say(
                f"can't be made again ({error.strerror}), and a second guard could start here"
            )
        if not _try(fd):
            holder = _holder(fd)
            os.close(fd)
            # On some network file systems a file has another number now and then: this is still our
            # own.
            if holder.pid == os.getpid():
                return None
            pid = holder.pid or "unknown"
            return self._say(
                f"the guard with pid {pid} has it now: two guards run here, stop one of them"
            )
        os.close(self._fd)
        self._fd = fd
        self._write()
        return None

    def _say(self, what: str) -> Finding | None:
        if self._lost:
            return None
        self._lost = True
        return make_finding("guard_degraded", what=f"{self._state.lock} was removed; {what}")

    def _open(self) -> int:
        make_folder(self._state.root)
        # One guard at a time: a second must not set aside the lock file that the first has just
        # made.
        folder = os.open(self._state.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            # Never one that is merely forbidden: its holder may be another user's guard.
            reason = wrong_kind(self._state.lock, stat.S_IFREG)
            if reason is not None:
                self.findings.append(set_aside_foreign(self._state.lock, reason))
            return self._file()
        finally:
            os.close(folder)

    def _file(self) -> int:
        return open_private(self._state.lock, os.O_RDWR | os.O_CREAT)

    def stopping(self, overwrite: Callable[[Path, bytes], None]) -> None:
        """Tell a successor that it is worth waiting; `overwrite` never waits for the disk."""
        self._stopping = True
        if self._fd is not None:
            overwrite(self._state.lock, self._content())

    def release(self) -> None:
        """Give the lock back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _content(self) -> bytes:
        says = {
            "pid": os.getpid(),
            "stopping": self._stopping,
            "stop_timeout_s": self._stop_timeout_s,
        }
        return json.dumps(says).encode().ljust(256) + b"\n"

    def _write(self) -> None:
        if self._fd is None:
            return
        # A full disk takes the successor's patience, not the lock itself.
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
        return Holder(int(says["pid"]), bool(says["stopping"]), float(says["stop_timeout_s"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Holder(None, False, 0.0)
