"""DiLoCo: local inner steps, then an outer step over the averaged pseudo-gradient.
miner-guard run -- torchrun --nproc-per-node=2 examples/diloco.py

The guard adds: a gate that blocks, on all ranks alike, uploads that validators would reject; the
time and size of each upload; and, for a hang in the AllReduce, the name of the missing rank.
"""

import os

import torch
import torch.distributed as dist

import miner_guard

OUTER_STEPS, INNER_STEPS = 2, int(os.environ.get("STEPS", "60"))

dist.init_process_group("gloo")
guard = miner_guard.init()
model = torch.nn.Linear(32, 1)
for parameter in model.parameters():
    dist.broadcast(parameter.data, src=0)
inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
shared = [parameter.detach().clone() for parameter in model.parameters()]
outer = torch.optim.SGD(shared, lr=0.7, momentum=0.9, nesterov=True)
for outer_step in range(1, OUTER_STEPS + 1):
    for inner_step in range(1, INNER_STEPS + 1):
        x = torch.randn(16, 32)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        inner.step()
        inner.zero_grad()
        guard.step(outer_step=outer_step, inner_step=inner_step, loss=loss, lr=1e-2)
        if inner_step % 30 == 0:
            decision = guard.may_upload(
                outer_step=outer_step, inner_step=inner_step, kind="gradient"
            )
            if decision.allowed:
                with guard.upload(decision):
                    pass  # publish the pseudo-gradient here
    with guard.phase("allreduce"):
        for parameter, start in zip(model.parameters(), shared, strict=True):
            start.grad = start - parameter.data
            dist.all_reduce(start.grad)
            start.grad /= dist.get_world_size()
        outer.step()
        for parameter, start in zip(model.parameters(), shared, strict=True):
            parameter.data.copy_(start)
guard.close(finished=True)
dist.destroy_process_group()
