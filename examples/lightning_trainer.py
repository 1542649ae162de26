"""Lightning's Trainer with the callback of the guard.
miner-guard run -- python examples/lightning_trainer.py

The guard adds: a restart from Lightning's own checkpoint if the run is killed, but not once it has
finished; a phase for validation, so that validation does not look like a slow step.
"""

import os
from pathlib import Path

import lightning
import torch

from miner_guard.integrations.lightning import LightningCallback

OUT = Path(os.environ.get("OUT", "out"))


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def training_step(self, batch: torch.Tensor, _number: int) -> torch.Tensor:
        return (self.layer(batch) - batch.sum(dim=1, keepdim=True)).square().mean()

    def validation_step(self, batch: torch.Tensor, _number: int) -> None:
        self.log("val_loss", self.training_step(batch, _number))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


train, held_out = (torch.utils.data.DataLoader(torch.randn(n, 16), 8) for n in (256, 32))
trainer = lightning.Trainer(
    max_steps=int(os.environ.get("STEPS", "100")),
    default_root_dir=OUT,
    logger=False,
    enable_progress_bar=False,
    callbacks=[LightningCallback()],
)
newest = max(OUT.glob("checkpoints/*.ckpt"), key=lambda p: p.stat().st_mtime, default=None)
trainer.fit(Model(), train, held_out, ckpt_path=newest)
