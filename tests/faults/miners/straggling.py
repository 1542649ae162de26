"""One rank of a miner whose last rank gets its data late for some steps, while the others wait for
it in a collective. With the argument `unnamed`, no phase says so."""

from __future__ import annotations

import contextlib
import sys
import time

import torch
import torch.distributed as dist

import miner_guard

STEPS, LATE_FROM, LATE_TO, LATE_S = 165, 15, 115, 0.25


def main() -> None:
    dist.init_process_group("gloo")
    guard = miner_guard.init()
    last = dist.get_rank() == dist.get_world_size() - 1
    loss = torch.zeros(1)
    phase = (lambda _: contextlib.nullcontext()) if "unnamed" in sys.argv else guard.phase
    for step in range(1, STEPS + 1):
        with phase("data"):
            time.sleep(LATE_S if last and LATE_FROM <= step < LATE_TO else 0.01)
        with phase("forward"):
            time.sleep(0.05)
        with phase("collective"):
            dist.all_reduce(loss)
        guard.step(outer_step=1, inner_step=step, loss=3.0 / step**0.1, lr=1e-4)
    guard.close(finished=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
