"""A training script whose whole step is compiled; torch aborts it if anything needs a second
compilation."""

import torch

torch._dynamo.config.error_on_recompile = True
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@torch.compile(backend="eager")
def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


x, y = torch.randn(32, 8), torch.randn(32, 1)
train(x, y)
for _ in range(5):
    print(f"loss {train(x, y).item():.4f}")
