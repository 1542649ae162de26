"""Keeps the guard's sockets and its lock file in place: recreates whatever something removes.

A cleanup of /tmp removes sockets too; `status` would then assume that no guard is running. Without
the lock file, a second guard could start in the same state directory and kill this guard's miner as
an orphan.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from miner_guard import state_dir
from miner_guard.guard.disk import DiskWriter
from miner_guard.guard.lock import Lock
from miner_guard.guard.loop import Loop
from miner_guard.record.events import Event, degraded

Close = Callable[[], None]


class Endpoints:
    """Keeps the sockets and the lock file in place. Supervisor thread only."""

    def __init__(
        self, lock: Lock, disk: DiskWriter, loop: Loop, report: Callable[[Event], None]
    ) -> None:
        self._lock, self._disk, self._loop, self._report = lock, disk, loop, report
        self._make: dict[Path, Callable[[], Close]] = {}
        self._close: dict[Path, Close] = {}
        self._refused: set[Path] = set()
        self._asked = False
        """Whether the guard is still waiting for the disk to respond."""

    def open(self, path: Path, make: Callable[[], Close]) -> None:
        """Create the socket at `path`, now and whenever it disappears. `make` creates it and
        returns a function that closes it, or raises OSError."""
        self._make[path] = make
        self._open(path)

    def _open(self, path: Path) -> None:
        try:
            self._close[path] = self._make[path]()
        except OSError as error:
            if path not in self._refused:
                self._refused.add(path)
                why = error.strerror or error
                what = f"cannot create {path.name}: {why}; the miner runs without it"
                self._report(degraded(what))
            return
        self._refused.discard(path)

    def check(self) -> None:
        """Recreate missing sockets and a missing lock file; call about once per second.

        It first waits, without blocking, until the disk responds: binding a socket or creating a
        lock file on an unresponsive disk would hang the supervisor.
        """
        missing = any(not path.exists() for path in self._make)
        if (missing or self._lock.lost()) and not self._asked:
            self._asked = True
            self._disk.when_it_answers(lambda: self._loop.soon(self._restore))

    def _restore(self) -> None:
        self._asked = False
        for path in self._make:
            if not path.exists():
                if path in self._close:
                    self._close.pop(path)()
                self._open(path)
        if (lost := self._lock.keep()) is not None:
            self._report(lost)

    def close(self) -> None:
        """Close and remove all sockets."""
        self._make.clear()
        for path, close in self._close.items():
            close()
            state_dir.remove(path)
        self._close.clear()
