"""A constant load until the file `end` appears, so that two readings of the GPU agree."""

from __future__ import annotations

import time

import torch

from tests.gpu.miners.rank import Rank

HELD_BYTES = 8 << 30


def main() -> None:
    rank = Rank()
    held = torch.ones(HELD_BYTES if rank.on_gpu else 1, dtype=torch.uint8, device=rank.device)
    while not (rank.folder / "end").exists():
        if rank.on_gpu:
            for _ in range(200):
                torch.mm(rank.square, rank.square)
        else:
            time.sleep(0.05)
        rank.step()
    assert held.numel()
    rank.finish()


if __name__ == "__main__":
    main()
