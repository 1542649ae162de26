"""A training loop of Lightning Fabric, as in its documentation."""

from __future__ import annotations

import lightning
import torch

torch.manual_seed(1)
fabric = lightning.Fabric(accelerator="cpu", devices=1)
fabric.launch()
model = torch.nn.Linear(8, 1)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
for step in range(6):
    inputs = torch.randn(16, 8)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(-1, keepdim=True))
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()
    print(f"iteration {step}: loss {loss.item():.4f}", flush=True)
