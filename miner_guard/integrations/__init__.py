"""Callbacks for trainers that other people wrote, in the style of each framework:

    from miner_guard.integrations.transformers import TransformersCallback
    trainer = Trainer(model, args, callbacks=[TransformersCallback()])

    from miner_guard.integrations.lightning import LightningCallback
    trainer = lightning.Trainer(callbacks=[LightningCallback()])

    from miner_guard.integrations.accelerate import AccelerateTracker
    accelerator = Accelerator(log_with=AccelerateTracker())

Each module imports its framework; this one imports none.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import miner_guard
from miner_guard.rank.guard import Guard
from miner_guard.rank.losses import Losses, Read
from miner_guard.rank.recorder import describe
from miner_guard.record.events import degraded


class TrainingRun:
    """What a framework's callbacks report to this process's guard. Never raises."""

    knows_losses = False
    """Whether the losses come from elsewhere, so that a callback need not report them."""

    def __init__(self) -> None:
        self.guard: Guard | None = None
        self.losses = Losses()
        self._consumed: list[Read] = []
        """The losses of the step that has not ended yet."""

        self._eval_loss: float | None = None

    def trains(self, framework: str, model: Any = None, **settings: Any) -> None:
        """Training begins. `settings`: the batch settings of `Guard.diagnose`. Collective. Does
        nothing under `--attach auto`, which reports the same steps."""
        if "miner_guard.attach.auto" in sys.modules:
            return
        self.guard = miner_guard.init()
        if model is not None:
            self.guard.diagnose(model, **settings)

    def share(self, loss: Any) -> None:
        """Add a loss to the step; a micro-batch's is already divided by their number."""
        try:
            read = self.losses.read(loss, whole=True)
        except Exception as error:  # noqa: BLE001 - the trainer must not notice; reported as guard_degraded
            if self.guard is not None:
                self.guard.emit(degraded(f"the loss can't be read: {describe(error)}"))
            return
        if read is not None:
            self._consumed.append(read)

    def step(self, number: int, optimizer: Any = None, **values: Any) -> None:
        """An optimizer step has ended. `values`: those of `Guard.step`."""
        guard = self.guard
        if guard is None:
            return
        if values and hasattr(values.get("loss"), "grad_fn"):
            self.share(values.pop("loss"))
        reads, self._consumed = self._consumed, []
        if "loss" not in values:
            values["loss"] = self.losses.take(number, reads)
        if optimizer is not None and "lr" not in values:
            values["lr"] = optimizer.param_groups[0].get("lr")
        if self._eval_loss is not None:
            evaluated, self._eval_loss = self._eval_loss, None
            values.setdefault("eval_loss", evaluated)
        guard.step(inner_step=number, **values)

    def evaluated(self, loss: Any) -> None:
        """An evaluation has ended; its loss goes with the next step."""
        self._eval_loss = loss

    def saved(self, path: str, number: int) -> None:
        if self.guard is not None and self.guard.rank == 0:
            self.guard.checkpoint_saved(path, step=number)

    def phase(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext() if self.guard is None else self.guard.phase(name)

    def finished(self) -> None:
        """Training has reached its configured end."""
        if self.guard is not None:
            self.guard.close(finished=True)
            self.guard = None
