"""DDP by torch.multiprocessing.spawn, as PyTorch's DDP tutorial starts it: no RANK in the
environment.

spawned.py STEPS: prints rank 0's losses.
"""

from __future__ import annotations

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank: int, world_size: int, steps: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for step in range(1, steps + 1):
        inputs = torch.randn(8, 16)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(-1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    mp.spawn(train, args=(2, int(sys.argv[1]) if len(sys.argv) > 1 else 6), nprocs=2)
