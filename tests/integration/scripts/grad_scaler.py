"""Mixed precision with a GradScaler as in PyTorch's AMP recipe; the first step overflows and is
skipped."""

from __future__ import annotations

import torch

torch.manual_seed(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
for iteration in range(7):
    # At first the scaled gradients overflow: the scaler halves its scale and the optimizer does not
    # step.
    inputs = torch.randn(16, 8) * (1e19 if iteration == 0 else 1.0)
    targets = inputs.sum(-1, keepdim=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(inputs)
    loss = torch.nn.functional.mse_loss(output.float(), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if iteration:
        print(
            f"iter {iteration}: scale {scaler.get_scale():.0f} loss {loss.item():.4f}", flush=True
        )
