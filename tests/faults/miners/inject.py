"""Injects a fault into an unmodified training script: inject.py FAULT SCRIPT ARG…

After the third optimizer step of rank 1 (of the only rank, without torchrun) FAULT happens:
`raises` an exception, `killed` by SIGKILL, `stopped` by SIGSTOP, `hangs` in its own code, `leaves`
with exit code 0. With `slow` every rank takes a while to load each batch, and rank 1 2.5 times as
long for seventy steps.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.utils.data.dataloader
from torch.optim.optimizer import register_optimizer_step_post_hook

AT_STEP = 3
SLOW_STEPS = range(10, 80)
BATCH_S, SLOW_BATCH_S = 0.04, 0.1
fault, script = sys.argv[1], sys.argv[2]
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(script))
culprit = os.environ.get("RANK", "1") == "1"
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
        sys.exit(0)
    os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[fault])


def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    global steps
    steps += 1
    if steps == AT_STEP and fault != "slow" and culprit:
        happen()


def loading(load: Callable[..., Any]) -> Callable[..., Any]:
    """`load`, delayed as this rank should be in the current step."""

    def loaded(*args: Any, **kwargs: Any) -> Any:
        time.sleep(SLOW_BATCH_S if culprit and steps in SLOW_STEPS else BATCH_S)
        return load(*args, **kwargs)

    return loaded


register_optimizer_step_post_hook(after_step)
if fault == "slow":
    # A loop without a data loader makes its batches with `randn`.
    for owner, name in (
        (torch.utils.data.dataloader._SingleProcessDataLoaderIter, "_next_data"),
        (torch, "randn"),
    ):
        setattr(owner, name, loading(getattr(owner, name)))
runpy.run_path(script, run_name="__main__")
