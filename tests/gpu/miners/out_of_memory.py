"""Fills the GPU until its allocator refuses; the next launch finishes. On the CPU it requests more
than any host has, because filling a host would kill other programs."""

from __future__ import annotations

import torch

from tests.gpu.miners.rank import Rank


def main() -> None:
    rank = Rank()
    rank.step()
    if rank.first_time("filled"):
        held = []
        size = torch.cuda.mem_get_info()[1] // 16 if rank.on_gpu else 1 << 50
        while True:
            held.append(torch.empty(size, dtype=torch.uint8, device=rank.device))
            rank.step()
    rank.finish()


if __name__ == "__main__":
    main()
