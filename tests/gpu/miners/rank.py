"""One rank of a process group, on the GPU if there is one; the miners here share it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import miner_guard


class Rank:
    """A process group of one rank (NCCL on a GPU, gloo on the CPU), and its hook.

    `sys.argv[1]` is a folder that outlives the launches of a test.
    """

    def __init__(self) -> None:
        self.folder = Path(sys.argv[1])
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
        )
        if self.on_gpu:
            torch.cuda.set_device(self.device)
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=self.device)
        else:
            dist.init_process_group("gloo")
        self.guard: Any = miner_guard.init()
        side = 2048 if self.on_gpu else 256
        self.square = torch.randn(side, side, device=self.device)
        self.number = 0

    def step(self) -> None:
        """One inner step: a product, a collective, the loss."""
        self.number += 1
        with self.guard.phase("forward"):
            loss = (self.square @ self.square).mean()
        with self.guard.phase("backward"):
            dist.all_reduce(loss)
        self.guard.step(outer_step=1, inner_step=self.number, loss=float(loss))

    def first_time(self, what: str) -> bool:
        """Whether this is the first such call in this test, across all launches."""
        path = self.folder / what
        if path.exists():
            return False
        path.touch()
        return True

    def finish(self) -> None:
        """Take a few more steps, then finish as configured."""
        for _ in range(4):
            self.step()
        self.guard.close(finished=True)
        dist.destroy_process_group()
