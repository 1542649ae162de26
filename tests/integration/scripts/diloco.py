"""A DiLoCo loop: inner steps with AdamW, then one outer step of Nesterov momentum over the
pseudo-gradient."""

from __future__ import annotations

import copy

import torch

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
shared = copy.deepcopy(model)
inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
for step in range(1, 9):
    inputs = torch.randn(16, 8)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(-1, keepdim=True))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    inner.step()
    inner.zero_grad()
    print(f"inner step {step}: loss {loss.item():.4f}", flush=True)
    if step % 4 == 0:
        for theirs, ours in zip(shared.parameters(), model.parameters(), strict=True):
            theirs.grad = theirs.data - ours.data
        outer.step()
        outer.zero_grad()
        model.load_state_dict(shared.state_dict())
