"""Enqueues a collective behind a kernel that never ends, and waits for it; the next launch
finishes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.gpu.miners.rank import Rank

CYCLES = 2**62
"""At 2 GHz this kernel takes 73 years."""


def main() -> None:
    rank = Rank()
    for _ in range(4):
        rank.step()
    if rank.first_time("spun"):
        total = torch.ones(1, device=rank.device)
        with rank.guard.phase("backward"):
            if rank.on_gpu:
                torch.cuda._sleep(CYCLES)  # type: ignore[attr-defined]
                dist.all_reduce(total)
                torch.cuda.synchronize()
            while True:
                torch.mm(rank.square, rank.square)
    rank.finish()


if __name__ == "__main__":
    main()
