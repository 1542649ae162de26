"""Fixes what a process inherits from its parent and the guard cannot work with, before anything
else runs.

That is signals that the parent blocked or ignores, and standard streams that it closed. Without
this the guard misses stop signals or the miner's exit, or opens the lock file as descriptor 1 and
prints into it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def settle_signals() -> None:
    """Unblock every signal that the parent blocked, and restore the ignored ones that the guard
    needs."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # If ignored, the kernel would reap the miner itself and its exit code would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Writing to or reading from a terminal that another job owns (`stty tostop`) would stop the
    # guard.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)


def continue_when_the_parent_dies() -> None:
    """For a helper that ends with its parent: have the kernel send it SIGCONT then. Stopped, it
    would not see the end of its input and stay for good."""
    # Only helpers need ctypes.
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)


def open_standard_streams() -> list[str]:
    """Open /dev/null on closed standard streams; return the names of those that were closed.

    Call before opening any file: the next file would get the number of a standard stream.
    """
    closed = [name for fd, name in enumerate(("stdin", "stdout", "stderr")) if not _is_open(fd)]
    for _ in closed:
        # open returns the lowest free number, which is the closed stream's.
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
