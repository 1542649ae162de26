"""One process, no framework. miner-guard run -- python examples/plain_loop.py

The guard adds: GPU diagnostics before the first step; reports of slow steps, NaN and loss spikes; a
restart after a crash; and, after a hang, its location in the code.
"""

import os

import torch

import miner_guard

STEPS = int(os.environ.get("STEPS", "100"))

guard = miner_guard.init()
model = torch.nn.Linear(32, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
guard.diagnose(model, batch_size=16)
for step in range(1, STEPS + 1):
    with guard.phase("data"):
        x = torch.randn(16, 32)
    with guard.phase("forward"):
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    with guard.phase("backward"):
        loss.backward()
    with guard.phase("optimizer"):
        optimizer.step()
        optimizer.zero_grad()
    # The loss stays a tensor: the guard reads it when that costs no synchronisation.
    guard.step(outer_step=1, inner_step=step, loss=loss, lr=1e-2)
guard.close(finished=True)
