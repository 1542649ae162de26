"""Hugging Face's Trainer with the callback of the guard.
miner-guard run -- python examples/hf_trainer.py

The guard adds: step lines with loss and learning rate, and every check based on them; a phase for
each evaluation and checkpoint; a restart after a crash, but not once training has finished.
"""

import os

import torch
from transformers import Trainer, TrainingArguments

from miner_guard.integrations.transformers import TransformersCallback


class Model(torch.nn.Linear):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (super().forward(x) - labels).square().mean()}


arguments = TrainingArguments(
    output_dir=os.environ.get("OUT", "out"),
    max_steps=int(os.environ.get("STEPS", "100")),
    logging_steps=1,
    save_strategy="no",
    report_to=[],
)
rows = [{"x": x, "labels": x.sum(dim=0, keepdim=True)} for x in torch.randn(256, 16)]
Trainer(Model(16, 1), arguments, train_dataset=rows, callbacks=[TransformersCallback()]).train()
