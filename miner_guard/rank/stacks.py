"""All threads' stacks on a signal, also from a rank that hangs inside C code."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path
from typing import IO

STACKS_SIGNAL = signal.SIGUSR2
"""A rank that gets this appends all its threads' stacks to `flight/rank-NNNN.stacks`.

Only where that file is there and names the rank's pid in its first line: without the handler the signal kills.
"""


class SignalTaken(Exception):
    """The program handles the signal itself."""


def register(path: Path) -> IO[bytes]:
    """Dump stacks to `path` on STACKS_SIGNAL for as long as the file stays open. Raises SignalTaken, OSError."""
    if signal.getsignal(STACKS_SIGNAL) is not signal.SIG_DFL:
        raise SignalTaken(f"{STACKS_SIGNAL.name} is in use by the program: no stacks at a hang, except by py-spy")
    file = open(path, "wb", buffering=0)  # noqa: SIM115 - open as long as the process: the handler writes to it
    file.write(b"pid %d\n" % os.getpid())
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    return file
