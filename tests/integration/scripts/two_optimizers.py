"""Two optimizers, each for a part of one model, like Muon and AdamW in nanochat."""

from __future__ import annotations

import torch

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizers = [
    torch.optim.SGD(model[0].parameters(), lr=1e-2, momentum=0.95, nesterov=True),
    torch.optim.AdamW(model[2].parameters(), lr=1e-2),
]
accumulation = 2
for step in range(8):
    mean = 0.0
    for _ in range(accumulation):
        inputs = torch.randn(16, 8)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(-1, keepdim=True))
        mean += loss.item() / accumulation
        (loss / accumulation).backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    print(f"step {step:05d} | loss {mean:.4f}", flush=True)
