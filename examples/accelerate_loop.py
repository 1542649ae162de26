"""A loop that uses Hugging Face's accelerate with gradient accumulation, unmodified.
miner-guard run --attach auto -- python examples/accelerate_loop.py

The guard adds: one step line per optimizer step, with the loss of all its micro-batches; reports of
slow steps and NaN; a restart after a crash.
"""

import os

import torch
from accelerate import Accelerator

STEPS, ACCUMULATE = int(os.environ.get("STEPS", "100")), 4

accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
rows = torch.utils.data.TensorDataset(torch.randn(8 * ACCUMULATE * STEPS, 32))
loader = torch.utils.data.DataLoader(rows, batch_size=8)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for (x,) in loader:
    with accelerator.accumulate(model):
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
accelerator.print("training finished")
