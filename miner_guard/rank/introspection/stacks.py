"""Dumps all threads' stacks on a signal, even while a rank hangs inside C code."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
from _signal import getsignal as _getsignal  # type: ignore[import-not-found]
from collections.abc import Callable
from pathlib import Path
from typing import IO

from miner_guard.state_dir import StateDir, make_folder, open_private

STACKS_SIGNAL = signal.SIGUSR2
"""A rank that receives this appends all its threads' stacks to `flight/rank-NNNN.stacks`.

Send it only if that file exists and its first line names the rank's pid: without the handler the
signal kills.
"""

WITHOUT = "no stacks at a hang, except by py-spy"
"""What is lost if the program has taken the signal."""

_NUMBER = int(STACKS_SIGNAL)
_registered = False
"""Our handler is in place, registered by an earlier guard of this process or by `begin_early`."""

_early: tuple[Path, IO[bytes]] | None = None
"""Where this process dumps its stacks before it has a rank, once `begin_early` has run."""


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
    _end_early(path)
    return file


def begin_early(state_dir: str | None) -> None:
    """Dump this process's stacks to a file named after its pid until it has a rank: it may hang
    before `init()`. Does nothing without a state directory or where the signal is taken."""
    global _early
    if not state_dir or _early is not None:
        return
    state = StateDir(Path(state_dir))
    path = state.early_stacks_of(os.getpid())
    if not state.socket.exists():
        # No guard runs that could ask for them.
        return
    try:
        make_folder(path.parent)
        _early = path, register(path)
    except (SignalTaken, OSError):
        # Only evidence of a hang that may never come is lost; the rank's guard reports it then.
        return
    atexit.register(path.unlink, missing_ok=True)


def _end_early(registered: Path) -> None:
    """The rank's own file has replaced the early one."""
    global _early
    if _early is not None and _early[0] != registered:
        (path, file), _early = _early, None
        file.close()
        path.unlink(missing_ok=True)


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
