"""A loop that uses Hugging Face's accelerate, with the guard as its tracker.
miner-guard run -- python examples/accelerate_loop.py

The guard adds: one step line per optimizer step, with the loss that the loop logs; reports of slow
steps and NaN; a restart after a crash.
"""

import os

import torch
from accelerate import Accelerator

from miner_guard.integrations.accelerate import AccelerateTracker

STEPS = int(os.environ.get("STEPS", "100"))

accelerator = Accelerator(log_with=AccelerateTracker())
accelerator.init_trackers("example")
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(torch.randn(8 * STEPS, 32), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, x in enumerate(loader, 1):
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss.item(), "lr": 1e-2}, step=step)
accelerator.end_training()
