"""One guard per state directory: a lock that the kernel gives back when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from dataclasses import dataclass

from miner_guard.events import Finding
from miner_guard.statedir import StateDir
from miner_guard.supervisor.tidy import put_away, wrong_kind

_JUST_ASKED_S = 1.0
"""A holder that got its signal this moment has not said yet that it is stopping."""


class Busy(Exception):
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
        self.findings: list[Finding] = []
        """What there is to say of the lock file itself, once there is a log."""

    def acquire(self) -> None:
        """Take the lock; wait for a holder that is stopping, up to its stop timeout. Raises Busy."""
        try:
            self._state.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = self._open()
        except OSError as error:
            raise Busy(
                f"state directory {self._state.root} can't be written: {error.strerror}; "
                "give another with --state-dir or make it writable"
            ) from error
        waited = 0.0
        while not _try(fd):
            holder = _holder(fd)
            limit = holder.stop_timeout_s + 5.0 if holder.stopping else _JUST_ASKED_S
            if waited >= limit:
                os.close(fd)
                doing = "is still stopping" if holder.stopping else "is running"
                raise Busy(
                    f"state directory {self._state.root} is in use: the guard with pid {holder.pid or 'unknown'} "
                    f"{doing} there; stop it, or give another with --name or --state-dir"
                )
            time.sleep(0.05)
            waited += 0.05
        self._fd = fd
        self._write(stopping=False)

    def _open(self) -> int:
        # One guard at a time: a second must not set aside the lock file that the first has just made.
        folder = os.open(self._state.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            # Never one that is merely forbidden: its holder may be another user's guard.
            reason = wrong_kind(self._state.lock, stat.S_IFREG)
            if reason is not None:
                self.findings.append(put_away(self._state.lock, reason))
            return os.open(self._state.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        finally:
            os.close(folder)

    def stopping(self) -> None:
        """Tell a successor that it is worth waiting."""
        self._write(stopping=True)

    def release(self) -> None:
        """Give the lock back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self, *, stopping: bool) -> None:
        if self._fd is None:
            return
        says = {"pid": os.getpid(), "stopping": stopping, "stop_timeout_s": self._stop_timeout_s}
        text = json.dumps(says).encode()
        try:
            os.pwrite(self._fd, text.ljust(256) + b"\n", 0)
            os.ftruncate(self._fd, 257)
        except OSError:
            # A full disk takes the successor's patience, not the lock itself.
            return


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
