"""What a process inherits from anyone who started it, and what the guard can't work with: put right
before anything else.

Signals that the parent blocked or ignores, and standard streams that it closed. Without this a stop
is never heard, the end of the miner goes unnoticed, or the lock file is opened as descriptor 1 and
printed into.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def settle_signals() -> None:
    """Let through every signal that the parent blocked, and take back what it ignores and the guard
    needs."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Ignored, the kernel would reap the miner itself, and its exit code were lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A write or read on a terminal that another job has (`stty tostop`) would stop the guard.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)


def open_standard_streams() -> list[str]:
    """Give closed standard streams to /dev/null; the names of those that were closed.

    Before any file is opened: the next one would get the number of a standard stream.
    """
    closed = [name for fd, name in enumerate(("stdin", "stdout", "stderr")) if not _is_open(fd)]
    for _ in closed:
        # The lowest free number, which is the closed stream's.
        os.open(os.devnull, os.O_RDWR)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w", encoding="utf-8", errors="replace", closefd=False))  # noqa: SIM115
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    return closed


def _is_open(fd: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(fd)
        return True
    return False
