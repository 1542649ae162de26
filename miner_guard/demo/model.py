"""A byte-level GPT: pre-norm blocks, learned positions, tied embeddings. Small enough for a laptop
CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256
"""The vocabulary: every byte is a token, so there is no tokenizer to download."""


@dataclass(frozen=True)
class Shape:
    """Dimensions of the model; the defaults give half a million parameters."""

    layers: int = 2
    width: int = 128
    heads: int = 4
    context: int = 128


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each with a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.norm_feed = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, context, width) to the same shape."""
        batch, context, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(
            batch, context, 3, self.heads, width // self.heads
        )
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, context, width))
        widened: Tensor = functional.gelu(self.up(self.norm_feed(x)))
        return torch.add(x, self.down(widened))


class ByteGPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.apply(_initialise)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte; `tokens` and `targets` are (batch, context),
        int64."""
        logits = self.logits(tokens)
        loss: Tensor = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return loss

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte, (batch, length, 256), for int64 `tokens` of shape (batch,
        length), where length <= context."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.token.weight)


def _initialise(module: nn.Module) -> None:
    # GPT-2's initialisation: N(0, 0.02) for every matrix.
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
