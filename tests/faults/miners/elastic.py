"""A rank under torchrun that trains until it is told to stop: elastic.py FOLDER [RANK=WORDS …]. One
after the other, at its sixth step, each of these ranks raises RuntimeError(WORDS)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import miner_guard

dist.init_process_group("gloo")
guard = miner_guard.init()
raised, faults, one = Path(sys.argv[1]), sys.argv[2:], torch.ones(1)
for step in range(1, 10**6):
    time.sleep(0.2)
    dist.all_reduce(one)
    guard.step(outer_step=1, inner_step=step, loss=3.0, lr=1e-4)
    number = len(list(raised.glob("raised-*")))
    if step == 6 and number < len(faults) and faults[number].startswith(f"{dist.get_rank()}="):
        (raised / f"raised-{number}").touch()
        raise RuntimeError(faults[number].partition("=")[2])
