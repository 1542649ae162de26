"""Resets inherited process state that would break the guard, before anything else runs.

A parent may have blocked or ignored signals, or closed standard streams. If the guard kept that
state, it would miss stop signals or the miner's exit, or it would open the lock file as descriptor
1 and print to it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def settle_signals() -> None:
    """Unblock every signal that the parent blocked, and restore the ignored ones that the guard
    needs."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # If SIGCHLD were ignored, the kernel would reap the miner, and its exit code would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Otherwise the kernel would stop the guard when it reads from a terminal that another job owns,
    # or writes to one (`stty tostop`).
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)


def continue_when_the_parent_dies() -> None:
    """Make the kernel send this process SIGCONT when its parent dies. A helper that exits at EOF
    on its input needs this: while suspended, it would never notice EOF and never exit."""
    # Only helpers need ctypes.
    from miner_guard.system.parent_death import signal_at_parents_death

    signal_at_parents_death(signal.SIGCONT)


def open_standard_streams() -> list[str]:
    """Open /dev/null on closed standard streams; return the names of those that were closed.

    Call this before opening any file, because the next file would get the number of a closed
    standard stream.
    """
    closed = [name for fd, name in enumerate(("stdin", "stdout", "stderr")) if not _is_open(fd)]
    for _ in closed:
        # open returns the lowest free number, which is that of a closed stream.
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
