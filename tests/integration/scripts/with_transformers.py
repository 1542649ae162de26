"""A run of Hugging Face's Trainer, small enough for a CPU."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(inputs)
        return {"loss": torch.nn.functional.mse_loss(logits, labels), "logits": logits}


class PerItem(Model):
    """Normalises by the number of items in the whole step, as the Trainer expects of a model that
    takes `num_items_in_batch`."""

    def forward(
        self, inputs: torch.Tensor, labels: torch.Tensor, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        logits = self.layer(inputs)
        items = kwargs.get("num_items_in_batch") or labels.numel()
        return {
            "loss": torch.nn.functional.mse_loss(logits, labels, reduction="sum") / items,
            "logits": logits,
        }


class Data(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"inputs": inputs, "labels": inputs.sum(0, keepdim=True)}


torch.manual_seed(1)
accumulation = 4 if "per-item" in sys.argv else 2
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    max_steps=6,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=accumulation,
    logging_steps=1,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    save_strategy="steps",
    save_steps=4,
    learning_rate=1e-2,
    eval_strategy="steps",
    eval_steps=2,
)


class Stop(TrainerCallback):
    """Stops early, as EarlyStoppingCallback does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 3


callbacks: list[Any] = [Stop()] if "stops" in sys.argv else []
if "callback" in sys.argv:
    from miner_guard.integrations.transformers import TransformersCallback

    callbacks.append(TransformersCallback())
model = PerItem() if "per-item" in sys.argv else Model()
trainer = Trainer(
    model=model, args=arguments, train_dataset=Data(), eval_dataset=Data(), callbacks=callbacks
)
trainer.train()
for row in trainer.state.log_history:
    if "loss" in row:
        print(f"iter {row['step']}: loss {float(row['loss']):.4f}", flush=True)
