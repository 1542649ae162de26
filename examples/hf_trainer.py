"""Hugging Face's Trainer, unmodified.
miner-guard run --attach auto -- python examples/hf_trainer.py

The guard adds: step lines with loss and learning rate, and every check based on them, although no
line here mentions the guard.
"""

import os

import torch
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        predicted = self.layer(x)
        return {"loss": (predicted - labels).square().mean(), "logits": predicted}


def row() -> dict[str, torch.Tensor]:
    x = torch.randn(16)
    return {"x": x, "labels": x.sum(dim=0, keepdim=True)}


arguments = TrainingArguments(
    output_dir=os.environ.get("OUT", "out"),
    max_steps=int(os.environ.get("STEPS", "100")),
    per_device_train_batch_size=8,
    logging_steps=5,
    save_strategy="no",
    report_to=[],
)
Trainer(model=Model(), args=arguments, train_dataset=[row() for _ in range(256)]).train()
