"""Hooks Hugging Face's Trainer and Lightning through their callback interfaces."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from miner_guard.attach.adapter import Adapter, in_phase

if TYPE_CHECKING:
    from miner_guard.attach.auto import Auto


def _after_init(cls: type, after: Callable[[Any], None]) -> None:
    original: Any = cls.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def initialised(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        after(self)

    cls.__init__ = initialised  # type: ignore[misc]


def _follow(adapter: Adapter, cls: type, method: str, phase: str) -> None:
    """Wrap the method in a phase, if this version of the framework has the method."""
    original = vars(cls).get(method)
    if inspect.isfunction(original):
        setattr(cls, method, in_phase(adapter, original, phase))


def _after(cls: type, method: str, then: Callable[..., None]) -> None:
    """Call `then(result, self, *args)` after the method, if this version of the framework has
    it."""
    original = vars(cls).get(method)
    if not inspect.isfunction(original):
        return

    @functools.wraps(original)
    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        then(result, self, *args, **kwargs)
        return result

    setattr(cls, method, followed)


def follow_transformers(adapter: Adapter, listener: Auto, module: Any) -> None:
    """Add the guard's callback to every Hugging Face Trainer."""
    base = importlib.import_module("transformers.trainer_callback").TrainerCallback

    class TransformersCallback(base):  # type: ignore[misc, valid-type]
        """Reports the Trainer's steps to the guard."""

        _stopped = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            listener.trains("transformers")
            listener.accumulates(args.gradient_accumulation_steps)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._stopped = control.should_training_stop
            listener.step(state.global_step, kwargs["optimizer"])

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._stopped = self._stopped or control.should_training_stop
            listener.evaluated((kwargs.get("metrics") or {}).get("eval_loss"))

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = os.path.abspath(args.output_dir)
            listener.saved(f"{folder}/checkpoint-{state.global_step}", state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Early stopping counts as a normal finish; running out of data does not.
            if self._stopped or state.global_step >= state.max_steps:
                listener.finished()

    _after_init(module.Trainer, lambda trainer: trainer.add_callback(TransformersCallback))
    # The Trainer sums and logs exactly what `training_step` returns, after any normalisation.
    _after(module.Trainer, "training_step", lambda loss, *_, **__: listener.share(loss))
    # No callback marks the start of these two methods, and they can take longer than any step.
    _follow(adapter, module.Trainer, "evaluate", "val_loss")
    _follow(adapter, module.Trainer, "_save_checkpoint", "checkpoint")


def follow_lightning(adapter: Adapter, listener: Auto, module: Any) -> None:
    """Add the guard's callback to every Lightning Trainer."""
    package = module.__name__.split(".trainer.")[0]
    base = importlib.import_module(f"{package}.callbacks").Callback

    class LightningCallback(base):  # type: ignore[misc, valid-type]
        """Reports Lightning's steps to the guard; Lightning's global step counts optimizer
        steps."""

        def __init__(self) -> None:
            self._seen = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            listener.trains("lightning")
            self._seen = trainer.global_step

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            if trainer.global_step != self._seen and trainer.optimizers:
                self._seen = trainer.global_step
                listener.step(trainer.global_step, trainer.optimizers[0])

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            adapter.phase("val_loss").__enter__()

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            adapter.phase("val_loss").__exit__(None, None, None)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.interrupted:
                listener.finished()

    _after_init(module.Trainer, lambda trainer: trainer.callbacks.insert(0, LightningCallback()))
    _follow(adapter, module.Trainer, "save_checkpoint", "checkpoint")

    def saved(_: Any, trainer: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        adapter.quiet(lambda: listener.saved(os.path.abspath(filepath), trainer.global_step))

    # Lightning's own callbacks run before the checkpoint is written.
    _after(module.Trainer, "save_checkpoint", saved)
