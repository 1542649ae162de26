"""A training loop as in nanoGPT: gradient accumulation, AdamW, a line per iteration; DDP under
torchrun."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

torch.manual_seed(1)
ddp = "RANK" in os.environ
if ddp:
    dist.init_process_group("gloo")
master = not ddp or dist.get_rank() == 0
model: torch.nn.Module = torch.nn.Sequential(
    torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
)
if ddp:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
accumulation = 4
for iteration in range(int(os.environ.get("STEPS", "6"))):
    mean = 0.0
    for _ in range(accumulation):
        inputs = torch.randn(16, 8)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(-1, keepdim=True))
        mean += loss.item() / accumulation
        (loss / accumulation).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if master:
        print(f"iter {iteration}: loss {mean:.4f}", flush=True)
if ddp:
    # Without this torch's own threads abort now and then at the end of the process.
    dist.destroy_process_group()
