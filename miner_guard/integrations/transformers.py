"""A callback for Hugging Face's Trainer, and for those built on it (TRL, sentence-transformers, …).

    trainer = Trainer(model, args, train_dataset=data, callbacks=[TransformersCallback()])

The loss is the one that the Trainer logs, so `logging_steps=1` shows it at every step.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from transformers.trainer_callback import TrainerCallback

from miner_guard.integrations import TrainingRun


class TransformersCallback(TrainerCallback):
    """Reports the Trainer's steps, evaluations, checkpoints and end to the guard."""

    def __init__(self, run: TrainingRun | None = None) -> None:
        self._run = TrainingRun() if run is None else run
        self._stopped = False
        self._unlogged: int | None = None
        """The step that has ended and whose loss the Trainer is about to log."""

        self._phase: AbstractContextManager[Any] = nullcontext()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.trains(
            "transformers",
            kwargs.get("model"),
            batch_size=args.per_device_train_batch_size,
            accumulation_steps=args.gradient_accumulation_steps,
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._enter(None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stopped = control.should_training_stop
        if control.should_log and not self._run.knows_losses:
            self._unlogged = state.global_step
        else:
            self._run.step(state.global_step, kwargs.get("optimizer"))
            self._enter_next(control)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._unlogged is not None:
            number, self._unlogged, logs = self._unlogged, None, kwargs.get("logs") or {}
            values = {"loss": logs.get("loss"), "grad_norm": logs.get("grad_norm")}
            self._run.step(number, kwargs.get("optimizer"), **values)
            self._enter_next(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._enter_next(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stopped = self._stopped or control.should_training_stop
        self._run.evaluated((kwargs.get("metrics") or {}).get("eval_loss"))
        self._enter_next(control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._enter(None)
        folder = os.path.abspath(args.output_dir)
        self._run.saved(f"{folder}/checkpoint-{state.global_step}", state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._enter(None)
        # Early stopping counts as a normal finish; running out of data does not.
        if self._stopped or state.global_step >= state.max_steps:
            self._run.finished()

    def _enter_next(self, control: Any) -> None:
        """Enter the phase of what the Trainer does next: no callback marks its start, and it can
        take longer than any step."""
        self._enter(
            "val_loss" if control.should_evaluate else "checkpoint" if control.should_save else None
        )

    def _enter(self, name: str | None) -> None:
        self._phase.__exit__(None, None, None)
        self._phase = nullcontext() if name is None else self._run.phase(name)
        self._phase.__enter__()
