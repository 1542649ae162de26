"""The process that pm2, systemd or a shell starts, in front of the keeper.

It forks the keeper, passes signals on to it, and exits with its code. Each ends the run if the
other is killed, and neither needs a list for that: the kernel gives what a dead keeper had started
to this process, because both are subreapers. The keeper hides its name, because a miner's updater
runs `pkill -9 python`, and operators run `pkill -9 -f miner-guard`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path

from miner_guard.exits import FAILED
from miner_guard.keeper.service import SystemdSocket
from miner_guard.keeper.teardown import end_descendants, reap
from miner_guard.system.children import continue_when_the_parent_dies
from miner_guard.system.descriptors import WakePipe, ready

NAME = b"keeper"

STOP_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGPWR, signal.SIGXCPU),
    *(signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO),
)
"""Signals that trigger a clean stop: by default each of them would end the process."""

_MAX_TEXT = 4096
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def stop_signals() -> list[signal.Signals]:
    """Those of `STOP_SIGNALS` that this process has to handle: under `nohup`, the run outlives its
    terminal."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignored]


class Signals:
    """Queues the signals of a process that waits for `wakeup`."""

    def __init__(self) -> None:
        self.wakeup = WakePipe()
        self._arrived: deque[int] = deque()
        for number in (*stop_signals(), signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
            signal.signal(number, lambda number, _frame: self._arrived.append(number))
        signal.set_wakeup_fd(self.wakeup.writing, warn_on_full_buffer=False)
        # They were blocked for the fork: none is lost, whichever of the two it was sent to.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def take(self) -> list[int]:
        """The signals that have arrived since the last call, except SIGCHLD."""
        taken = [self._arrived.popleft() for _ in range(len(self._arrived))]
        return [number for number in taken if number != signal.SIGCHLD]


def become_subreaper() -> bool:
    """Adopt the orphans among this process's descendants; False if the kernel refuses."""
    return bool(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def in_front_of(keep: Callable[[socket.socket, SystemdSocket | None], int]) -> int:
    """Fork the keeper, which calls `keep` with a socket that takes texts for systemd and that is
    at EOF once this process is gone. Returns its exit code. Raises OSError if the fork fails."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    systemd = SystemdSocket.inherited(os.environ)
    become_subreaper()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    keeper = os.fork()
    if keeper == 0:
        ours.close()
        _live(keep, theirs, systemd)
    theirs.close()
    signals = Signals()
    while (status := dict(reap()).get(keeper)) is None:
        readable = ready([signals.wakeup.reading, ours.fileno()], None)
        if ours.fileno() in readable:
            # At EOF, the keeper is about to be reaped.
            text = ours.recv(_MAX_TEXT)
            if systemd is not None and text:
                systemd.notify(text)
        if signals.wakeup.reading in readable:
            signals.wakeup.clear()
        for number in signals.take():
            os.kill(keeper, number)
    if os.WIFSIGNALED(status):
        end_descendants()
        return FAILED
    return os.waitstatus_to_exitcode(status)


def _live(
    keep: Callable[[socket.socket, SystemdSocket | None], int],
    front: socket.socket,
    systemd: SystemdSocket | None,
) -> None:
    """The keeper's life. Never returns."""
    code = FAILED
    try:
        # A service manager, a terminal or a `kill` of the whole group must not end both at once.
        os.setsid()
        continue_when_the_parent_dies()
        _hide()
        code = keep(front, systemd)
    except BaseException:  # noqa: BLE001 - a bug must not leave a miner that nobody stops; it is printed
        traceback.print_exc()
        end_descendants()
    finally:
        os._exit(code)


def _hide() -> None:
    """Change the name that `ps` shows and `pkill` matches, with and without `-f`."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_bytes(NAME)
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        # arg_start and arg_end, fields 48 and 49 of proc(5).
        start, end = int(fields[45]), int(fields[46])
        if 0 < start < end:
            ctypes.memset(start, 0, end - start)
            ctypes.memmove(start, NAME, min(len(NAME), end - start))
