"""Dumps all threads' stacks on a signal, even while a rank hangs inside C code."""

from __future__ import annotations

import faulthandler
import os
import signal
from _signal import getsignal as _getsignal  # type: ignore[import-not-found]
from collections.abc import Callable
from pathlib import Path
from typing import IO

from miner_guard.state_dir import open_private

STACKS_SIGNAL = signal.SIGUSR2
"""A rank that receives this appends all its threads' stacks to `flight/rank-NNNN.stacks`.

Send it only if that file exists and its first line names the rank's pid: without the handler the
signal kills.
"""

WITHOUT = "no stacks at a hang, except by py-spy"
"""What is lost if the program has taken the signal."""

_NUMBER = int(STACKS_SIGNAL)
_registered = False
"""Our handler is in place, registered by an earlier guard of this process."""


class SignalTaken(Exception):
    """The program handles the signal itself."""


def register(path: Path) -> IO[bytes]:
    """Dump stacks to `path` on STACKS_SIGNAL while the file stays open. Raises SignalTaken,
    OSError."""
    global _registered
    if taken() or (_caught() and not _registered):
        raise SignalTaken(f"{STACKS_SIGNAL.name} is used by the program: {WITHOUT}")
    fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    file = open(fd, "wb", buffering=0)  # noqa: SIM115 - open as long as the process: the handler writes to it
    file.write(b"pid %d\n" % os.getpid())
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    _registered = True
    return file


def taken() -> bool:
    """Whether the program handles or ignores the signal through Python's `signal`, which does not
    show faulthandler's handlers."""
    # Called at every step: `signal.getsignal` wraps the result in an enum, which takes 35 times as
    # long.
    return bool(_getsignal(_NUMBER) != 0)


def release(file: IO[bytes]) -> None:
    """Clear the file, so that it names no process and the signal is no longer sent. Raises
    OSError."""
    file.truncate(0)


class StackDumps:
    """This rank's readiness to dump its stacks, until the program takes the signal."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        """`report(subject, what)` takes what went wrong."""
        self._report = report
        self._file: IO[bytes] | None = None

    def begin(self, path: Path) -> None:
        """Dump stacks to `path` from now on. Raises SignalTaken, OSError."""
        self._file = register(path)

    def check(self) -> None:
        """At each step: if the program now handles the signal itself, the supervisor must stop
        sending it. Raises OSError."""
        if self._file is not None and taken():
            file, self._file = self._file, None
            release(file)
            self._report("stacks", f"{STACKS_SIGNAL.name} is now used by the program: {WITHOUT}")


def _caught() -> bool:
    """Whether a handler exists that `signal` does not know: the program's own faulthandler."""
    with open("/proc/self/status", "rb") as status:
        mask = next((int(line.split()[1], 16) for line in status if line.startswith(b"SigCgt:")), 0)
    return bool(mask >> (STACKS_SIGNAL - 1) & 1)
