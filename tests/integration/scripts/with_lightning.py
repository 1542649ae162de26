"""A run of Lightning's Trainer, small enough for a CPU; with `checkpoints` it saves every third
step to the folder `saved`."""

from __future__ import annotations

import logging
import sys
from typing import Any

import lightning
import torch

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        (inputs,) = batch
        return torch.nn.functional.mse_loss(self.layer(inputs), inputs.sum(-1, keepdim=True))

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        print(f"iter {self.trainer.global_step}: loss {outputs['loss'].item():.4f}", flush=True)

    def validation_step(self, batch: Any, index: int) -> None:
        self.layer(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


save = lightning.pytorch.callbacks.ModelCheckpoint("saved", every_n_train_steps=3, save_top_k=-1)
saving = "checkpoints" in sys.argv
callbacks: list[Any] = [save] if saving else []
if "callback" in sys.argv:
    from miner_guard.integrations.lightning import LightningCallback

    callbacks.append(LightningCallback())
torch.manual_seed(1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(24, 8)), batch_size=4)
trainer = lightning.Trainer(
    max_steps=6,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=saving,
    callbacks=callbacks,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), data, data)
