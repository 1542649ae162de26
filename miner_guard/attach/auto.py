"""Hooks any unmodified training script. It takes steps from the optimizer, the loss from `backward`
and devices from the optimized parameters.

For Hugging Face's Trainer and Lightning, steps come from callbacks instead of the optimizer.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

from miner_guard.attach.adapter import Adapter, in_phase
from miner_guard.attach.losses import Losses
from miner_guard.rank.harmless import skip_wrappers, uncompiled

_OTHERS_IN_A_ROW = 64
"""Once the other optimizers have taken this many steps since the leader's last one, one of them
becomes the leader."""


class Leader:
    """Decides which of several optimizers counts the training steps.

    If the optimizers take turns, as in a GAN, the last one of each cycle ends the training step, so
    that the step includes the losses of all of them. If one steps more often than the others, it
    counts the training steps: DiLoCo's inner optimizer steps many times per outer step, and a
    critic several times per generator step.
    """

    def __init__(self) -> None:
        self._leader: Callable[[], Any] = lambda: None
        self._steps = 0
        self._others = 0
        self._last_other: Callable[[], Any] = lambda: None
        self.cyclic = False
        """Whether every optimizer steps once per training step; the step's loss is then the sum of
        their losses."""

    def leads(self, optimizer: Any) -> bool:
        """Record a step of `optimizer`; return whether it ends a training step."""
        leader = self._leader()
        if leader is None or self._others >= _OTHERS_IN_A_ROW:
            self._leader, leader = weakref.ref(optimizer), optimizer
            self._steps, self._others, self.cyclic = 0, 0, False
        if leader is not optimizer:
            self._others += 1
            self._last_other = weakref.ref(optimizer)
            return False
        last = self._last_other()
        if self._steps == 1 and self._others and last is not None:
            # This is the leader's second step, with others in between: from now on, the last of
            # those ends the training step.
            self._leader, self._steps, self._others, self.cyclic = self._last_other, 2, 1, True
            return False
        self._steps += 1
        self._others = 0
        return True


class Auto:
    """Hooks one training process."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.losses = Losses()
        self.framework: str | None = None
        """The framework whose callbacks report the steps; None if steps come from the optimizer."""

        self.steps = 0
        self._leader = Leader()
        self._stepping_now: list[weakref.ref[Any]] = []
        """The optimizers whose `step` is running, innermost last."""

        self._closure_seen = False
        self._diagnosed = False
        self.eval_loss: float | None = None
        """The loss of a framework's evaluation, to be recorded with the next step."""

    # Hooks for a plain training loop, without a framework.

    def follow_torch(self, module: Any) -> None:
        """Hook the entry to autograd's engine, which `Tensor.backward` calls too, and all
        optimizers; `torch.optim.optimizer` was just imported."""
        import torch

        backward: Any = torch.autograd.backward

        @uncompiled
        @functools.wraps(backward)
        def followed(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            self.adapter.quiet(self._backward, tensors, grad_tensors)
            with self.adapter.phase("backward"):
                return backward(tensors, grad_tensors, *args, **kwargs)

        module.register_optimizer_step_pre_hook(uncompiled(self._stepping))
        module.register_optimizer_step_post_hook(uncompiled(self._stepped))
        torch.autograd.backward = followed

    def follow_scaler(self, module: Any) -> None:
        """Hook the GradScaler, which makes the program call `backward` on the loss times a varying
        scale; `torch.amp.grad_scaler` was just imported."""
        scaler = module.GradScaler
        scale, update = scaler.scale, scaler.update

        @functools.wraps(scale)
        def scaled(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if result is not outputs:
                self.adapter.quiet(self.losses.scaled, outputs, result)
            return result

        @functools.wraps(update)
        def updated(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            # If losses are left, the scaler found infinite gradients and no optimizer stepped. The
            # next step gathers new losses. A disabled scaler lets every step through.
            if scaler.is_enabled():
                self.losses.drop()
            return update(scaler, *args, **kwargs)

        scaler.scale, scaler.update = uncompiled(scaled), uncompiled(updated)

    def follow_data(self, module: Any) -> None:
        """Hook data loaders; `torch.utils.data.dataloader` was just imported."""
        loader = module._BaseDataLoaderIter
        loader.__next__ = in_phase(self.adapter, loader.__next__, "data")

    def _backward(self, tensors: Any, gradients: Any) -> None:
        # Begin here rather than at import, because launchers and dataloaders import torch too.
        self.begin()
        if self.framework == "transformers":
            return
        if self._stepping_now:
            # LBFGS evaluates its closure many times per step; `step` returns the first value.
            if self._closure_seen:
                return
            self._closure_seen = True
        for loss in losses_of(tensors, gradients):
            self.losses.note(loss)

    def begin(self) -> None:
        """Create the guard, because this process is training."""
        self.adapter.begin(agree=False)

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        while self._stepping_now and any(each() is optimizer for each in self._stepping_now):
            # This optimizer's last step raised, so its post-step hook never ran.
            self._leave()
        self._stepping_now.append(weakref.ref(optimizer))
        self._closure_seen = False
        self.adapter.phase("optimizer").__enter__()

    def _leave(self) -> None:
        self._stepping_now.pop()
        self.adapter.phase("optimizer").__exit__(None, None, None)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not any(each() is optimizer for each in self._stepping_now):
            # A subclass whose `step` calls its parent's: torch runs the hooks for both, and the
            # parent's have ended the step.
            return
        self._leave()
        if self.framework is None:
            self._ended(optimizer)

    def _ended(self, optimizer: Any) -> None:
        """End a step, because the optimizer has stepped and no framework reports the steps."""
        if self._leader.leads(optimizer):
            self.steps += 1
            self.step(self.steps, optimizer)
        elif not self._leader.cyclic:
            # This optimizer's losses belong to a different objective from the leader's.
            self.losses.drop()

    def step(self, number: int, optimizer: Any) -> None:
        """End a step, as reported by the optimizer or a framework's callback."""
        self.adapter.quiet(self._step, number, optimizer)

    def _step(self, number: int, optimizer: Any) -> None:
        self.begin()
        guard = self.adapter.guard
        assert guard is not None
        loss = self.losses.take(number)
        evaluated, self.eval_loss = self.eval_loss, None
        guard.step(
            inner_step=number,
            loss=loss,
            lr=optimizer.param_groups[0].get("lr"),
            eval_loss=evaluated,
        )
        if not self._diagnosed:
            self._diagnosed = True
            guard.diagnose(
                optimized(optimizer),
                accumulation_steps=self.losses.micro_batches,
                model_name=os.path.basename(sys.argv[0]),
            )

    # What a framework reports.

    def trains(self, framework: str) -> None:
        """Take steps from this framework's callbacks from now on, because it is starting to
        train."""
        self.framework = framework
        self.adapter.quiet(self.begin)

    def share(self, loss: Any) -> None:
        self.adapter.quiet(functools.partial(self.losses.note, whole=True), loss)

    def saved(self, path: str, number: int) -> None:
        guard = self.adapter.guard
        if guard is not None and guard.rank == 0:
            guard.checkpoint_saved(path, step=number)

    def finished(self) -> None:
        """Close the guard as finished, because a framework has reached its configured end."""
        if self.adapter.guard is not None:
            self.adapter.quiet(self.adapter.guard.close, True)
            self.adapter.guard = None


def losses_of(tensors: Any, gradients: Any) -> list[Any]:
    """The losses among what a program passes to `torch.autograd.backward`. Of several tensors, one
    passed with a gradient is not a loss: a pipeline passes the next stage's gradient, and a
    checkpoint that of what it recomputes."""
    import torch

    if isinstance(tensors, torch.Tensor):
        return [tensors]
    if not isinstance(tensors, (list, tuple)):
        return []
    if not isinstance(gradients, (list, tuple)):
        gradients = [gradients] * len(tensors)
    return [
        tensor
        for tensor, gradient in zip(tensors, gradients, strict=False)
        if gradient is None and isinstance(tensor, torch.Tensor)
    ]


def optimized(optimizer: Any) -> Any:
    """A module with the parameters that the optimizer trains, wherever FSDP or DDP put them."""
    import torch

    module = torch.nn.Module()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        if isinstance(parameter, torch.nn.Parameter):
            module.register_parameter(f"p{number}", parameter)
    return module


# Hugging Face's Trainer and Lightning, through their callback interfaces.


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
            listener.losses.micro_batches = args.gradient_accumulation_steps

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._stopped = control.should_training_stop
            listener.step(state.global_step, kwargs["optimizer"])

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._stopped = self._stopped or control.should_training_stop
            listener.eval_loss = (kwargs.get("metrics") or {}).get("eval_loss")

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
            self._global_step = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            listener.trains("lightning")
            self._global_step = trainer.global_step

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            if trainer.global_step != self._global_step and trainer.optimizers:
                self._global_step = trainer.global_step
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


_auto = Auto(Adapter("auto"))


def imported(name: str, module: Any) -> None:
    """Hook a watched module. The sitecustomize calls this after the module is imported."""
    if name == "torch.optim.optimizer":
        _auto.follow_torch(module)
    elif name == "torch.amp.grad_scaler":
        _auto.follow_scaler(module)
    elif name == "torch.utils.data.dataloader":
        _auto.follow_data(module)
    elif name == "torch._dynamo.eval_frame":
        skip_wrappers()
    else:
        follow = follow_transformers if name == "transformers.trainer" else follow_lightning
        follow(_auto.adapter, _auto, module)
