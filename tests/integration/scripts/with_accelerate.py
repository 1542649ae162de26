"""An accelerate training loop with gradient accumulation, as in its documentation."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator

accumulation = 4
torch.manual_seed(1)
accelerator = Accelerator(gradient_accumulation_steps=accumulation, cpu=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = int(os.environ.get("STEPS", "6")) * accumulation * accelerator.num_processes
rows = torch.utils.data.TensorDataset(torch.randn(4 * batches, 8))
data = torch.utils.data.DataLoader(rows, batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
mean = 0.0
for (inputs,) in data:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(-1, keepdim=True))
        mean += loss.item() / accumulation
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        print(f"loss {mean:.4f}", flush=True)
        mean = 0.0
