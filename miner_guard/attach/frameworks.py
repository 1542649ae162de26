"""Hugging Face's Trainer and Lightning, through the callback interfaces that they offer."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from miner_guard.attach.adapter import in_phase

if TYPE_CHECKING:
    from miner_guard.attach.auto import Auto


def _after_init(cls: type, after: Callable[[Any], None]) -> None:
    original: Any = cls.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def initialised(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        after(self)

    cls.__init__ = initialised  # type: ignore[misc]


def _follow(auto: Auto, cls: type, method: str, phase: str) -> None:
    """Calls of the method are that phase, where this version of the framework has it."""
    original = vars(cls).get(method)
    if inspect.isfunction(original):
        setattr(cls, method, in_phase(auto.adapter, original, phase))


def follow_transformers(auto: Auto, module: Any) -> None:
    """Every Trainer gets one callback more."""
    base = importlib.import_module("transformers.trainer_callback").TrainerCallback

    class GuardCallback(base):  # type: ignore[misc, valid-type]
        """Tells the guard of the Trainer's steps."""

        _stopped = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            auto.framework = "transformers"
            auto.adapter.quiet(auto.begin)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._stopped = control.should_training_stop
            auto.step(state.global_step, kwargs["optimizer"])

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._stopped = self._stopped or control.should_training_stop
            auto.evaluated((kwargs.get("metrics") or {}).get("eval_loss"))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Stopped early by a callback is an end that was configured; that the data ran out is none.
            if self._stopped or state.global_step >= state.max_steps:
                auto.adapter.quiet(auto.finished)

    _after_init(module.Trainer, lambda trainer: trainer.add_callback(GuardCallback))
    # No callback says that either begins, and both may take longer than a step ever did.
    _follow(auto, module.Trainer, "evaluate", "val_loss")
    _follow(auto, module.Trainer, "_save_checkpoint", "checkpoint")


def follow_lightning(auto: Auto, module: Any) -> None:
    """Every Trainer gets one callback more."""
    package = module.__name__.split(".trainer.")[0]
    base = importlib.import_module(f"{package}.callbacks").Callback

    class GuardCallback(base):  # type: ignore[misc, valid-type]
        """Tells the guard of Lightning's steps; its global step counts optimizer steps."""

        def __init__(self) -> None:
            self._seen = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            auto.framework = "lightning"
            self._seen = trainer.global_step
            auto.adapter.quiet(auto.begin)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            if trainer.global_step != self._seen and trainer.optimizers:
                self._seen = trainer.global_step
                auto.step(trainer.global_step, trainer.optimizers[0])

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            auto.adapter.phase("val_loss").__enter__()

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            auto.adapter.phase("val_loss").__exit__(None, None, None)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.interrupted:
                auto.adapter.quiet(auto.finished)

    _after_init(module.Trainer, lambda trainer: trainer.callbacks.insert(0, GuardCallback()))
    _follow(auto, module.Trainer, "save_checkpoint", "checkpoint")
