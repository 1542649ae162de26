"""LBFGS, whose step evaluates its closure many times, as in PyTorch's time sequence example."""

from __future__ import annotations

import torch

torch.manual_seed(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
inputs = torch.randn(64, 8)


def closure() -> torch.Tensor:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(-1, keepdim=True) + 1)
    loss.backward()
    return loss


for step in range(4):
    print(f"step {step}: loss {optimizer.step(closure).item():.4f}", flush=True)
