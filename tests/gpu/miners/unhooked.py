"""A program without the hook: after three steps, any call that waits for the GPU raises."""

from __future__ import annotations

import time

import torch

STEPS = 40


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(STEPS):
        if step == 3 and device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        inputs = torch.randn(64, 256, device=device)
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        time.sleep(0.05)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    print(f"the program made {STEPS} steps", flush=True)


if __name__ == "__main__":
    main()
