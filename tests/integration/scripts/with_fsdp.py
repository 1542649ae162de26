"""A training loop over a model that torch shards among the ranks (FSDP2)."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
accumulation, steps = 3, int(os.environ.get("STEPS", "4"))
rows = torch.utils.data.TensorDataset(torch.randn(16 * accumulation * steps, 8))
batches = iter(torch.utils.data.DataLoader(rows, batch_size=16))
for iteration in range(steps):
    mean = 0.0
    for _ in range(accumulation):
        (inputs,) = next(batches)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs[:, :2])
        mean += loss.item() / accumulation
        (loss / accumulation).backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"iter {iteration}: loss {mean:.4f}", flush=True)
# Without this torch's own threads abort now and then at the end of the process.
dist.destroy_process_group()
