"""Epochs over a DataLoader with a scheduler and a test, as in PyTorch's MNIST example."""

from __future__ import annotations

import torch

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
inputs, classes = torch.randn(96, 16), torch.randint(0, 4, (96,))
data = torch.utils.data.TensorDataset(inputs, classes)
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
for epoch in range(1, 3):
    model.train()
    for batch, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"Train Epoch: {epoch} [{batch}/{len(loader)}] loss {loss.item():.4f}", flush=True)
    model.eval()
    with torch.no_grad():
        correct = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    print(f"Test set: Accuracy: {correct}/96", flush=True)
    scheduler.step()
