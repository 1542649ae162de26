"""A callback for Lightning's Trainer: `Trainer(callbacks=[LightningCallback()])`."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from miner_guard.integrations import TrainingRun

_OLD_NAME = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    Callback = importlib.import_module(
        "pytorch_lightning" if _OLD_NAME else "lightning.pytorch"
    ).Callback


class LightningCallback(Callback):
    """Reports Lightning's steps and validations to the guard. Lightning's global step counts
    optimizer steps."""

    def __init__(self, run: TrainingRun | None = None) -> None:
        self._run = TrainingRun() if run is None else run
        self._global_step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        settings = {"accumulation_steps": trainer.accumulate_grad_batches}
        self._run.trains("lightning", pl_module, **settings)
        self._global_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None and not self._run.knows_losses:
            self._run.share(loss)
        if trainer.global_step != self._global_step and trainer.optimizers:
            self._global_step = trainer.global_step
            self._run.step(trainer.global_step, trainer.optimizers[0])

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._run.phase("val_loss").__enter__()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.phase("val_loss").__exit__(None, None, None)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.interrupted:
            self._run.finished()
