"""A tracker for accelerate.

accelerator = Accelerator(log_with=AccelerateTracker())
accelerator.init_trackers("run")
accelerator.log({"loss": loss.item(), "lr": lr}, step=step)   # after each optimizer step
accelerator.end_training()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.tracking import GeneralTracker, on_main_process

from miner_guard.integrations import TrainingRun

_NAMES = {
    "loss": ("loss", "train_loss", "train/loss"),
    "lr": ("lr", "learning_rate", "train/learning_rate"),
    "grad_norm": ("grad_norm", "train/grad_norm"),
    "eval_loss": ("eval_loss", "val_loss", "eval/loss"),
}
"""What programs call the values of `Guard.step`."""


class AccelerateTracker(GeneralTracker):  # type: ignore[misc]
    """Takes each new `step` that the program logs for the end of an optimizer step."""

    name = "miner_guard"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self._run = TrainingRun()
        self._step: int | None = None

    @property
    def tracker(self) -> Any:
        return self._run.guard

    @on_main_process  # type: ignore[untyped-decorator]
    def start(self) -> None:
        self._run.trains("accelerate")

    @on_main_process  # type: ignore[untyped-decorator]
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        reported = {
            name: values[alias]
            for name, aliases in _NAMES.items()
            for alias in aliases
            if alias in values
        }
        if step is not None and step != self._step:
            if self._step is None and self._run.guard is None:
                # Versions before 1.8 have no `start`.
                self.start()
            self._step = step
            self._run.step(step, **{"loss": None, **reported})
        elif "eval_loss" in reported:
            self._run.evaluated(reported["eval_loss"])

    def finish(self) -> None:
        self._run.finished()
