"""A training script without the hook: trainer.py STEPS THEN TOKEN.

DDP under torchrun.

THEN: `ends` runs to its end, `catches` prints an exception raised in its loop and exits with 0,
`leaves` ends rank 1 after 15 steps.
"""

from __future__ import annotations

import os
import sys
import traceback

import torch
import torch.distributed as dist

steps, then = int(sys.argv[1]), sys.argv[2]
ddp = "RANK" in os.environ
if ddp:
    dist.init_process_group("gloo")
model: torch.nn.Module = torch.nn.Linear(8, 1)
if ddp:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)


def train() -> None:
    for step in range(1, steps + 1):
        inputs = torch.randn(4, 8)
        torch.nn.functional.mse_loss(model(inputs), inputs.sum(-1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 15 and then == "leaves" and dist.get_rank() == 1:
            return
        if step == 15 and then == "catches":
            raise RuntimeError("shape '[4, 8]' is invalid for input of size 31")


try:
    train()
except RuntimeError:
    if then != "catches":
        raise
    traceback.print_exc()
print("the script is at its end", flush=True)
