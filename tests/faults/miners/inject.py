"""Injects a fault into a training script that knows nothing of it: inject.py FAULT SCRIPT ARG…

After the third optimizer step of rank 1 (of the only rank, without torchrun) FAULT happens:
`raises` an exception, `killed` by SIGKILL, `stopped` by SIGSTOP, `hangs` in its own code, `leaves`
with exit code 0.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

AT_STEP = 3
fault, script = sys.argv[1], sys.argv[2]
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(script))
steps = 0


def stuck() -> None:
    while True:
        time.sleep(1)


def happen() -> None:
    if fault == "raises":
        raise RuntimeError("shape '[4, 8]' is invalid for input of size 31")
    if fault == "hangs":
        stuck()
    if fault == "leaves":
        os._exit(0)
    os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[fault])


def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    global steps
    steps += 1
    if steps == AT_STEP and os.environ.get("RANK", "1") == "1":
        happen()


register_optimizer_step_post_hook(after_step)
runpy.run_path(script, run_name="__main__")
