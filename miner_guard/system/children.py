"""Starts the guard's helper processes, settles what a process inherits from its parent, and decides
how long to wait before restarting a helper that exited."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys

_BOOT = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); del sys.argv[1]; import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""Replaces `python -m`, which would import `json` from the working directory, where the miner may
have a `json.py`. Python 3.10 has no `-P`, and `-I` would ignore PYTHONPATH."""


def module_command(name: str, python: str = sys.executable) -> list[str]:
    """The command for `python -m NAME` without the working directory on the module path. Callers
    may append arguments."""
    return [python, "-c", _BOOT, "-m", name]


_PR_SET_PDEATHSIG = 1
_M_ARENA_MAX = -8

_libc = ctypes.CDLL(None)


def signal_at_parents_death(number: int) -> None:
    """Make the kernel send signal `number` to this process when the thread that forked it ends.
    Safe between fork and exec; survives exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


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


def settle_memory() -> None:
    """Keep a process that runs for weeks as small as it is once its modules are loaded."""
    # What exists now stays; garbage would be collected only once there is a quarter as much. The
    # second call makes Python count again, without what is frozen.
    gc.collect()
    gc.freeze()
    gc.collect()
    with contextlib.suppress(AttributeError):
        # glibc gives each thread a heap of its own, up to 8 per core, which never shrink.
        _libc.mallopt(_M_ARENA_MAX, 1)


def continue_when_the_parent_dies() -> None:
    """Make the kernel send this process SIGCONT when its parent dies. A process that acts on
    EOF from its parent needs this: while suspended, it would never notice EOF. Safe between fork
    and exec; survives exec."""
    signal_at_parents_death(signal.SIGCONT)


def open_standard_streams() -> None:
    """Open /dev/null on closed standard streams.

    Call this before opening any file, because the next file would get the number of a closed
    standard stream.
    """
    # open returns the lowest free number, which is that of a closed stream.
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(fd)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w", encoding="utf-8", errors="replace", closefd=False))  # noqa: SIM115
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115


_FIRST_S = 1.0
_MAX_S = 60.0
_HEALTHY_S = 120.0
"""A process that ran at least this long started properly, so its exit resets the wait."""


class Backoff:
    """Doubles the wait each time, from 1 s up to 60 s, while a process keeps exiting soon after
    starting."""

    def __init__(self) -> None:
        self._wait_s = 0.0
        self.first = False
        """Whether the latest exit is the first in a series of early exits. Only the first is
        reported."""

    def ended(self, lived_s: float) -> float:
        """Record the exit of a process that ran for `lived_s` seconds. Returns the number of
        seconds to wait before restarting it."""
        if lived_s >= _HEALTHY_S:
            self._wait_s = 0.0
        self.first = self._wait_s == 0.0
        self._wait_s = min(max(_FIRST_S, 2 * self._wait_s), _MAX_S)
        return self._wait_s


def memory_file(name: str) -> int:
    """A descriptor of an empty file in memory, to share with a child. Raises OSError."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError:
        # Some containers' profiles forbid it.
        return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
