"""A character-level GPT in the style of nanoGPT's train.py, unmodified.
miner-guard run --attach auto -- python examples/nanogpt.py

The guard adds: a line with loss and learning rate for each step, although the script prints one
only every ten iterations; a verdict on the loss curve; stacks when it hangs; restarts.
"""

import math
import os
from pathlib import Path

import torch
from torch.nn import functional

STEPS, BATCH, BLOCK, WIDTH = int(os.environ.get("STEPS", "200")), 8, 32, 64
torch.manual_seed(1337)
text = Path(__file__).read_text(encoding="utf-8")
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])


class GPT(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(len(letters), WIDTH)
        self.places = torch.nn.Embedding(BLOCK, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
        self.blocks = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, len(letters), bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(BLOCK)
        hidden = self.blocks(self.tokens(x) + self.places(torch.arange(BLOCK)), mask)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - BLOCK - 1, (BATCH,))
    rows = torch.stack([data[i : i + BLOCK + 1] for i in starts])
    return rows[:, :-1], rows[:, 1:]


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
for iteration in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * min((iteration + 1) / 10, 0.5 * (1 + math.cos(iteration / STEPS)))
    loss = model(*get_batch())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iteration % 10 == 0:
        print(f"iter {iteration}: loss {loss.item():.4f}", flush=True)
