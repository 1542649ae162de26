"""Activation checkpointing, gradient clipping and a warm-up, as in torchtitan's loop."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

torch.manual_seed(1)
layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3, betas=(0.9, 0.95))
for step in range(1, 7):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * min(1.0, step / 3)
    inputs = hidden = torch.randn(16, 8)
    for layer in layers:
        hidden = torch.tanh(checkpoint(layer, hidden, use_reentrant=False))
    loss = torch.nn.functional.mse_loss(hidden, inputs)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step: {step:2}  loss {loss.item():.4f}  grad_norm: {norm:.4f}", flush=True)
