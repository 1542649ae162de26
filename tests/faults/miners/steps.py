"""One rank with the hook and no torch: steps.py STEPS STEP_S THEN TOKEN.

THEN: `finish` closes as finished and exits 0, `exit0` just exits, `hang` stays in a data phase
forever, `fail` reports that its loop failed and waits forever, `linger` closes the hook and keeps
running, `crash` exits with 3, `checkpoints` reports when one is requested, `done` closes as
finished and keeps running, `asleep` waits before it calls the hook, `waits` waits in a backward
phase, `killed` is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import miner_guard

steps, step_s, then = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
if then == "asleep":
    time.sleep(600)
guard = miner_guard.init()
for step in range(1, steps + 1):
    with guard.phase("forward"):
        time.sleep(step_s)
    guard.step(outer_step=0, inner_step=step, loss=3.0, lr=1e-4)
    if then == "checkpoints" and guard.checkpoint_requested():
        print("checkpoint asked for", flush=True)
if then == "finish":
    guard.close(finished=True)
elif then == "crash":
    sys.exit(3)
elif then == "hang":
    with guard.phase("data"):
        time.sleep(600)
elif then == "fail":
    print(
        "Training Loop Failed with error: CUDA out of memory. Tried to allocate 2.00 GiB.",
        file=sys.stderr,
        flush=True,
    )
    time.sleep(600)
elif then in ("linger", "done"):
    guard.close(finished=then == "done")
    time.sleep(600)
elif then == "waits":
    with guard.phase("backward"):
        time.sleep(600)
elif then == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
