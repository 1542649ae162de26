"""A rank that averages one number with the others at each step: all_reduce.py FILE TOKEN.

Each step appends a line to FILE: its end (monotonic), the rank, the world size.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

import miner_guard

out = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
guard = miner_guard.init()
for step in range(1, 10**6):
    with guard.phase("forward"):
        time.sleep(0.1)
    with guard.phase("collective"):
        dist.all_reduce(torch.ones(1))
    guard.step(outer_step=0, inner_step=step, loss=3.0, lr=1e-4)
    os.write(out, b"%.3f %d %d\n" % (time.monotonic(), rank, size))
