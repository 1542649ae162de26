"""FSDP2 on every rank. miner-guard run -- torchrun --nproc-per-node=2 examples/fsdp2.py

The guard adds: which rank holds which shard on which device, which rank the others are waiting for,
and the stacks of all ranks when one never arrives.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import miner_guard

STEPS = int(os.environ.get("STEPS", "100"))
device = "cuda" if torch.cuda.is_available() else "cpu"

dist.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
guard = miner_guard.init()  # collective: after init_process_group
mesh = init_device_mesh(device, (dist.get_world_size(),))
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).to(device)
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
guard.diagnose(model, batch_size=8, effective_batch_size=8 * dist.get_world_size())
for step in range(1, STEPS + 1):
    x = torch.randn(8, 64, device=device)
    with guard.phase("forward"):
        loss = (model(x) - x).square().mean()
    with guard.phase("backward"):
        loss.backward()
    with guard.phase("optimizer"):
        optimizer.step()
        optimizer.zero_grad()
    guard.step(outer_step=1, inner_step=step, loss=loss, lr=1e-3)
guard.close(finished=True)
dist.destroy_process_group()
