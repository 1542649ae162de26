"""Lose at most one step. miner-guard run -- torchrun --nproc-per-node=2 examples/checkpoints.py

The guard adds: a snapshot in memory after each step, complete checkpoints on disk and, after a kill
or a hang, a relaunch that resumes from the newest of them.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import miner_guard
from miner_guard.checkpoints import Checkpointer

STEPS, OUT = int(os.environ.get("STEPS", "100")), Path(os.environ.get("OUT", "checkpoints"))
device = "cuda" if torch.cuda.is_available() else "cpu"

dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
guard = miner_guard.init()
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).to(device)
fully_shard(model, mesh=init_device_mesh(device, (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
checkpoints = Checkpointer(OUT, every=50, memory_every=1)
done = 0


def state():
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "done": done}


with guard.phase("load_state"):
    found = state()
    if checkpoints.resume(found):
        both = {"model_state_dict": found["model"], "optim_state_dict": found["optimizer"]}
        set_state_dict(model, optimizer, **both)
        done = int(found["done"])
while done < STEPS:
    x = torch.randn(8, 64, device=device)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    done += 1
    checkpoints.snapshot(done, state, loss=float(loss))
    if checkpoints.due(done, asked=guard.checkpoint_requested()):
        checkpoints.save(done, state(), loss=float(loss))
    guard.step(outer_step=1, inner_step=done, loss=loss, lr=1e-3)
checkpoints.close()
guard.close(finished=True)
dist.destroy_process_group()
