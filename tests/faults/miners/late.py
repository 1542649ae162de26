"""One rank of a miner whose last rank asks a collective question late, and then continues. late.py
LATE_S all|alone TOKEN"""

from __future__ import annotations

import sys
import time

import torch.distributed as dist

import miner_guard

STEPS, LATE_AT = 600, 10


def asks(rank: int, step: int) -> bool:
    """Whether this rank asks at this step. `alone`: only rank 0 ever asks."""
    return step % 5 == 0 and (rank == 0 or sys.argv[2] != "alone")


def main() -> None:
    late_s = float(sys.argv[1])
    dist.init_process_group("gloo")
    guard = miner_guard.init()
    last = dist.get_rank() == dist.get_world_size() - 1
    for step in range(1, STEPS + 1):
        with guard.phase("data"):
            time.sleep(late_s if last and step == LATE_AT else 0.1)
        if asks(dist.get_rank(), step):
            guard.may_upload(outer_step=1, inner_step=step)
        guard.step(outer_step=1, inner_step=step, loss=3.0, lr=1e-4)


if __name__ == "__main__":
    main()
