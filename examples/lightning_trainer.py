"""Lightning's Trainer, unmodified. miner-guard run --attach auto -- python
examples/lightning_trainer.py

The guard adds: a restart from Lightning's own checkpoint if the run is killed, but not once it has
finished; a phase for validation, so that validation does not look like a slow step.
"""

import os
from pathlib import Path

import lightning
import torch

OUT = Path(os.environ.get("OUT", "out"))


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def training_step(self, batch: list[torch.Tensor], _number: int) -> torch.Tensor:
        (x,) = batch
        loss = (self.layer(x) - x.sum(dim=1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], _number: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches(count: int) -> torch.utils.data.DataLoader[tuple[torch.Tensor, ...]]:
    rows = torch.utils.data.TensorDataset(torch.randn(count, 16))
    return torch.utils.data.DataLoader(rows, batch_size=8)


trainer = lightning.Trainer(
    max_steps=int(os.environ.get("STEPS", "100")),
    max_epochs=-1,
    default_root_dir=OUT,
    accelerator="auto",
    logger=False,
    enable_progress_bar=False,
)
newest = max(OUT.glob("checkpoints/*.ckpt"), key=lambda p: p.stat().st_mtime, default=None)
trainer.fit(Model(), batches(256), batches(32), ckpt_path=newest)
