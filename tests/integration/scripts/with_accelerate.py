"""An accelerate training loop with gradient accumulation, as in its documentation."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from accelerate import Accelerator

accumulation = 4
torch.manual_seed(1)
trackers: list[Any] = []
if "callback" in sys.argv:
    from miner_guard.integrations.accelerate import AccelerateTracker

    trackers.append(AccelerateTracker())
accelerator = Accelerator(gradient_accumulation_steps=accumulation, cpu=True, log_with=trackers)
accelerator.init_trackers("run")
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = int(os.environ.get("STEPS", "6")) * accumulation * accelerator.num_processes
rows = torch.utils.data.TensorDataset(torch.randn(4 * batches, 8))
data = torch.utils.data.DataLoader(rows, batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
mean, step = 0.0, 0
for (inputs,) in data:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(-1, keepdim=True))
        mean += loss.item() / accumulation
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        step += 1
        accelerator.log({"loss": mean, "lr": optimizer.param_groups[0]["lr"]}, step=step)
        print(f"loss {mean:.4f}", flush=True)
        mean = 0.0
accelerator.end_training()
