"""A GAN as in PyTorch's DCGAN example: the discriminator steps on two losses, then the generator on
its own."""

from __future__ import annotations

import torch

torch.manual_seed(1)
generator = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
discriminator = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
criterion = torch.nn.BCEWithLogitsLoss()
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4)
for iteration in range(6):
    discriminator.zero_grad()
    real = criterion(discriminator(torch.randn(16, 8)), torch.ones(16, 1))
    real.backward()
    made = generator(torch.randn(16, 4))
    fake = criterion(discriminator(made.detach()), torch.zeros(16, 1))
    fake.backward()
    optimizer_d.step()
    generator.zero_grad()
    fooled = criterion(discriminator(made), torch.ones(16, 1))
    fooled.backward()
    optimizer_g.step()
    d, g = (real + fake).item(), fooled.item()
    print(f"[{iteration}] Loss_D: {d:.4f} Loss_G: {g:.4f} total loss {d + g:.4f}", flush=True)
