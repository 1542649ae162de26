"""Holds GPU memory and dies by SIGKILL when told to; each launch first records the free memory."""

from __future__ import annotations

import os
import signal
import time

import torch

from tests.gpu.miners.rank import Rank

HELD_BYTES = 16 << 30


def main() -> None:
    rank = Rank()
    free = torch.cuda.mem_get_info()[0] if rank.on_gpu else 0
    with open(rank.folder / "free", "a", encoding="utf-8") as file:
        file.write(f"{free}\n")
    if rank.first_time("held"):
        size = HELD_BYTES if rank.on_gpu else 1
        held = torch.ones(size, dtype=torch.uint8, device=rank.device)
        while not (rank.folder / "die").exists():
            rank.step()
            time.sleep(0.05)
        assert held.numel() == size
        os.kill(os.getpid(), signal.SIGKILL)
    rank.finish()


if __name__ == "__main__":
    main()
