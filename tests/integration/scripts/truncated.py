"""Truncated backpropagation through time: a hidden state that each step detaches."""

from __future__ import annotations

import torch

torch.manual_seed(1)
model = torch.nn.LSTM(4, 8, batch_first=True)
head = torch.nn.Linear(8, 4)
parameters = [*model.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.1)
state = None
for step in range(6):
    inputs = torch.randn(2, 6, 4)
    output, state = model(inputs, state)
    state = tuple(part.detach() for part in state)
    loss = torch.nn.functional.mse_loss(head(output), inputs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"batch {step} loss {loss.item():.4f}", flush=True)
