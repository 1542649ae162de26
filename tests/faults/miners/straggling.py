"""One rank of a miner whose last rank gets its data late for some steps, while the others wait for
it in a collective."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import miner_guard

STEPS, LATE_FROM, LATE_TO, LATE_S = 125, 15, 75, 0.25


def main() -> None:
    dist.init_process_group("gloo")
    guard = miner_guard.init()
    last = dist.get_rank() == dist.get_world_size() - 1
    loss = torch.zeros(1)
    for step in range(1, STEPS + 1):
        with guard.phase("data"):
            time.sleep(LATE_S if last and LATE_FROM <= step < LATE_TO else 0.01)
        with guard.phase("forward"):
            time.sleep(0.05)
        with guard.phase("collective"):
            dist.all_reduce(loss)
        guard.step(outer_step=1, inner_step=step, loss=3.0 / step**0.1, lr=1e-4)
    guard.close(finished=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
