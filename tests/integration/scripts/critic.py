"""WGAN: the critic steps five times for each step of the generator; its loss is logged."""

from __future__ import annotations

import torch

torch.manual_seed(1)
generator, critic = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
optimizer_c = torch.optim.RMSprop(critic.parameters(), lr=5e-5)
optimizer_g = torch.optim.RMSprop(generator.parameters(), lr=5e-5)
for step in range(1, 11):
    optimizer_c.zero_grad()
    made = generator(torch.randn(16, 4)).detach()
    distance = critic(made).mean() - critic(torch.randn(16, 8)).mean() + 2.0
    distance.backward()
    optimizer_c.step()
    print(f"critic step {step}: loss {distance.item():.4f}", flush=True)
    if step % 5 == 0:
        optimizer_g.zero_grad()
        (-critic(generator(torch.randn(16, 4))).mean()).backward()
        optimizer_g.step()
