"""One rank that steps until it is stopped: steady.py FILE STEP_S TOKEN.

Appends a line per step to FILE: pid, number, time of its end, seconds inside the hook and in
prints. Both exclude the time spent waiting for a processor, because that wait is for other programs
on this machine, not for the guard. On SIGUSR1 one of its threads prints a megabyte. It has a child
that ignores SIGTERM and has no environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import miner_guard

file, step_s, token = sys.argv[1], float(sys.argv[2]), sys.argv[3]
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def print_a_megabyte() -> None:
    for _ in range(125):
        os.write(1, (b"x" * 79 + b"\n") * 100)


def flood(_number: int, _frame: object) -> None:
    threading.Thread(target=print_a_megabyte, daemon=True).start()


signal.signal(signal.SIGUSR1, flood)
subprocess.Popen([sys.executable, "-S", "-c", f"{DEAF} # {token}"], env={}, start_new_session=True)
guard = miner_guard.init()
out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
waits = os.open("/proc/thread-self/schedstat", os.O_RDONLY)


def clock() -> float:
    """Monotonic seconds, excluding the time that this thread spent ready but not running."""
    return time.monotonic() - int(os.pread(waits, 64, 0).split()[1]) / 1e9


number = 0
while True:
    number += 1
    began = clock()
    with guard.phase("forward"):
        inside = clock() - began
        time.sleep(step_s)
        began = clock()
    guard.step(outer_step=0, inner_step=number, loss=3.0, lr=1e-4)
    os.write(1, b"launch %d line %d\n" % (os.getpid(), number))
    end = clock()
    inside += end - began
    os.write(out, b"%d %d %.6f %.6f\n" % (os.getpid(), number, end, inside))
