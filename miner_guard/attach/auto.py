"""Hooks any unmodified training script, by watching what updates its parameters: an optimizer of
torch's, or whatever else changes them between two backwards. The loss of a step is the one whose
gradients the update consumed.

For Hugging Face's Trainer and Lightning, steps come from callbacks instead (`integrations`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from miner_guard.attach.adapter import Adapter, in_phase
from miner_guard.attach.updates import Consumer, Leader, Observed, leaves
from miner_guard.integrations import TrainingRun
from miner_guard.rank.environment import loaded_module
from miner_guard.rank.guard import skip_wrappers, uncompiled
from miner_guard.rank.losses import Read
from miner_guard.rank.recorder import describe
from miner_guard.system.clock import Once

_REPLACED = (
    "torch.func gets new parameters at each step, not updated ones, so the steps are not seen; "
    "call guard.step(), or use --attach log"
)
_OTHER_THREAD = (
    "several threads train in this process; only the steps of the first one are recorded. Train in "
    "one process each, with RANK and WORLD_SIZE set, to have them all"
)


class _Thread(threading.local):
    """What runs in one thread."""

    def __init__(self) -> None:
        self.stepping: list[weakref.ref[Any]] = []
        """The optimizers whose `step` is running, innermost last."""

        self.backwards = 0
        """How many backwards are running, one inside the other."""

        self.watched: list[Consumer] = []
        """The consumers that a backward may reach, as of `Auto._changes`."""

        self.changes = -1
        self.updated: list[Any] = []
        """The optimizers that have stepped inside the running backward."""


class Auto(TrainingRun):
    """Hooks one training process."""

    knows_losses = True

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self.adapter = adapter
        self.framework: str | None = None
        """The framework whose callbacks report the steps; None if they come from the updates."""

        self.steps = 0
        self._here = _Thread()
        self._leader = Leader()
        self._consumers: dict[int, Consumer] = {}
        """By the optimizer's `id`."""

        self._changes = 0
        """How often the consumers that a backward may reach have changed."""

        self._usual: Consumer | None = None
        """The only optimizer's, once it is known how the program trains: the usual step takes a
        short way through the hooks."""

        self._tensor: type = object
        """`torch.Tensor`."""

        self._backward_phase: AbstractContextManager[Any] = contextlib.nullcontext()
        self._optimizer_phase: AbstractContextManager[Any] = contextlib.nullcontext()
        self._observed: Observed | None = None
        self._sure = False
        """Whether those are parameters, and not plain tensors, which may be the program's input."""

        self._floating: list[Read] = []
        """Losses whose gradients have not reached the parameters that an optimizer holds: FSDP
        keeps them until the last micro-batch, and mixed precision in a copy of the parameters."""

        self._parameter: type = object
        """`torch.nn.Parameter`."""

        self._transforms: Any = None
        """What `torch.func` is made of; None if this torch lacks it."""

        self._diagnosed = False
        self._said = Once()

    # Hooks for a plain training loop, without a framework.

    def follow_torch(self, module: Any) -> None:
        """Hook the entries to autograd's engine (`Tensor.backward` calls one of them) and all
        optimizers; `torch.optim.optimizer` was just imported."""
        import torch

        self._parameter, self._tensor = torch.nn.Parameter, torch.Tensor
        backward: Any = torch.autograd.backward
        grad: Any = torch.autograd.grad
        add_param_group: Any = module.Optimizer.add_param_group
        self._transforms = transforms = loaded_module("torch._C._functorch")

        @uncompiled
        @functools.wraps(backward)
        def followed(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            here, begun = self._here, None
            if not here.backwards:
                begun = self.adapter.quiet(self._begin_backward, tensors, grad_tensors)
            here.backwards += 1
            try:
                with self._backward_phase:
                    result = backward(tensors, grad_tensors, *args, **kwargs)
            finally:
                here.backwards -= 1
            if begun is not None:
                self.adapter.quiet(self._end_backward, *begun, tensors)
            return result

        @uncompiled
        @functools.wraps(grad)
        def differentiated(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            creates_graph = len(args) > 2 or kwargs.get("create_graph")
            if creates_graph and not (transforms and transforms.peek_interpreter_stack()):
                # Only a part of what the program differentiates next, such as a penalty.
                return grad(outputs, inputs, *args, **kwargs)
            self.adapter.quiet(self._observe)
            result = grad(outputs, inputs, *args, **kwargs)
            self.adapter.quiet(self._offer, outputs, inputs)
            return result

        @functools.wraps(add_param_group)
        def added(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = add_param_group(optimizer, *args, **kwargs)
            self.adapter.quiet(self._register, optimizer)
            return result

        module.register_optimizer_step_pre_hook(uncompiled(self._stepping, self._failed))
        module.register_optimizer_step_post_hook(uncompiled(self._stepped, self._failed))
        module.Optimizer.add_param_group = added
        torch.autograd.backward, torch.autograd.grad = followed, differentiated

    def follow_scaler(self, module: Any) -> None:
        """Hook the GradScaler, which makes the program call `backward` on the loss times a varying
        scale; `torch.amp.grad_scaler` was just imported."""
        scale = module.GradScaler.scale

        @functools.wraps(scale)
        def scaled(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if result is not outputs:
                self.adapter.quiet(self.losses.scaled, outputs, result)
            return result

        module.GradScaler.scale = uncompiled(scaled)

    def follow_data(self, module: Any) -> None:
        """Hook data loaders; `torch.utils.data.dataloader` was just imported."""
        loader = module._BaseDataLoaderIter
        loader.__next__ = in_phase(self.adapter, loader.__next__, "data")

    def begin(self) -> None:
        """Create the guard, because this process is training."""
        if self.guard is None:
            self.adapter.begin(agree=False)
            self._backward_phase = self.adapter.phase("backward")
            self._optimizer_phase = self.adapter.phase("optimizer")
            self.guard = self.adapter.guard

    def _register(self, optimizer: Any) -> Consumer:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        number = id(optimizer)
        consumer = self._consumers.get(number)
        if consumer is None:

            def ended(_: object) -> None:
                del self._consumers[number]
                self._changes += 1
                self._usual = None

            consumer = Consumer(parameters)
            consumer.optimizer = weakref.ref(optimizer, ended)
            self._consumers[number] = consumer
        else:
            consumer.watch(parameters)
        self._changes += 1
        self._usual = None
        return consumer

    def _watched(self) -> list[Consumer]:
        """The consumers that a backward in this thread may reach."""
        here, changes = self._here, self._changes
        if here.changes != changes:
            thread = threading.get_ident()
            here.changes, here.watched = (
                changes,
                [
                    each
                    for each in list(self._consumers.values())
                    if not each.inside and each.thread in (None, thread)
                ],
            )
        if not here.watched and self._observed is not None:
            return [self._observed]
        return here.watched

    # What happens while the program trains.

    def _begin_backward(
        self, tensors: Any, gradients: Any
    ) -> tuple[list[Consumer], list[Read]] | None:
        """The consumers that the backward may reach, and its losses; None if the framework
        reports the steps."""
        if self.guard is None:
            # Here rather than at import, because launchers and dataloaders import torch too.
            self.begin()
        if self.framework == "transformers":
            return None
        if self._observed is not None:
            self._observe()
        watched = self._watched()
        for consumer in watched:
            consumer.begin_backward()
        losses = [tensors] if isinstance(tensors, self._tensor) else losses_of(tensors, gradients)
        reads = [read for loss in losses if (read := self.losses.read(loss)) is not None]
        return watched, reads

    def _end_backward(
        self, watched: Sequence[Consumer], reads: Sequence[Read], tensors: Any
    ) -> None:
        reached = [each.arrived(reads) for each in watched]
        here = self._here
        if here.updated:
            updated, here.updated = here.updated[-1], []
            self._consumed += reads
            self._ended(updated)
        elif reads and not (any(reached) and (self._consumers or self._sure)):
            self._unplaced(reads, losses_of(tensors, None))

    def _unplaced(self, reads: Sequence[Read], losses: Sequence[Any]) -> None:
        """A backward has changed no gradient that is watched."""
        parameters = [parameter for loss in losses for parameter in leaves(loss)]
        # A plain tensor may be the program's input, whose gradients update nothing.
        sure = any(isinstance(each, self._parameter) for each in parameters)
        if self._consumers:
            self._floating += reads if sure else ()
        elif parameters and (sure or self._observed is None):
            if sure and not self._sure:
                self._observed, self._sure = None, True
            self._observe_too(parameters).reads += reads

    def _offer(self, outputs: Any, inputs: Any) -> None:
        """`autograd.grad` has returned gradients, which the program may make the parameters'."""
        inputs = inputs if isinstance(inputs, (list, tuple)) else [inputs]
        plain = [self._unwrapped(each) for each in inputs]
        parameters = [each for each in plain if getattr(each, "is_leaf", False)]
        transformed = any(each is not wrapped for each, wrapped in zip(plain, inputs, strict=True))
        losses = [self.losses.read(self._unwrapped(loss)) for loss in losses_of(outputs, None)]
        # A transform may differentiate the loss of each sample: the step is seen, its loss unknown.
        reads = [read or Read() for read in losses if read is not None or transformed]
        if not self._consumers:
            held = self._observed.holds if self._observed is not None else None
            if transformed and held and len(parameters) > 1 and not any(map(held, parameters)):
                self._say_once(_REPLACED)
            elif parameters and reads:
                self.begin()
                self._observe_too(parameters).offer(reads)
            return
        for consumer in self._watched():
            if any(map(consumer.watches, parameters)):
                consumer.offered += reads

    def _observe_too(self, parameters: Sequence[Any]) -> Observed:
        """Watch these parameters, because no optimizer of torch's holds them."""
        observed = self._observed
        if observed is None:
            # More than once does no harm.
            atexit.register(self._observe)
        elif all(map(observed.holds, parameters)):
            return observed
        else:
            parameters = [*observed.param_groups[0]["params"], *parameters]
        self._observed = Observed(parameters)
        self._observed.unsure = observed is not None and bool(observed.reads)
        return self._observed

    def _observe(self) -> None:
        """End a step if something other than an optimizer of torch's has updated the
        parameters."""
        observed = self._observed
        if observed is not None and not self._consumers and observed.updated():
            self._consumed += observed.end_step()
            self._ended(observed)

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        stepping = self._here.stepping
        while stepping and any(each() is optimizer for each in stepping):
            # This optimizer's last step raised, so its post-step hook never ran.
            self._leave(stepping)
        stepping.append(weakref.ref(optimizer))
        self._optimizer_phase.__enter__()
        consumer = self._consumers.get(id(optimizer))
        if consumer is None or not consumer.holds_first(optimizer.param_groups[0]["params"]):
            # It was copied or unpickled, or FSDP has exchanged its parameters.
            consumer = self._register(optimizer)
        thread, inside = threading.get_ident(), self._here.backwards > 0
        if thread != consumer.thread or inside != consumer.inside:
            consumer.thread, consumer.inside = thread, inside
            self._changes += 1
        consumer.begin_step()

    def _failed(self, optimizer: Any, error: Exception) -> None:
        self.adapter.degraded(f"a step of {type(optimizer).__name__}: {describe(error)}")

    def _leave(self, stepping: list[weakref.ref[Any]]) -> None:
        stepping.pop()
        self._optimizer_phase.__exit__(None, None, None)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        stepping = self._here.stepping
        if not stepping or (
            stepping[-1]() is not optimizer and all(each() is not optimizer for each in stepping)
        ):
            # A subclass whose `step` calls its parent's: torch runs the hooks for both, and the
            # parent's have ended the step.
            return
        self._leave(stepping)
        consumer = self._consumers[id(optimizer)]
        reads, here = consumer.end_step(), self._here
        unusual = here.backwards or here.stepping or self._floating or self._consumed
        usual = consumer is self._usual and len(reads) == 1 and not unusual
        if usual and self.guard is not None and (loss := reads[0].value) is not None:
            self.steps += 1
            lr = optimizer.param_groups[0].get("lr")
            self.guard.step(inner_step=self.steps, loss=loss, lr=lr)
            return
        if floating := self._floating:
            # With the optimizer's own losses, only FSDP's belong to the same step for sure.
            self._floating = []
            reads += floating if consumer.sharded or not reads else [Read()]
        if not (consumer.fed or reads or _has_gradient(optimizer)):
            # It has updated nothing.
            return
        if here.backwards:
            here.updated.append(optimizer)
        elif self.framework is not None or here.stepping:
            # Another optimizer's step called this one's.
            self._consumed += reads
        else:
            self._ended(optimizer, reads)

    def _ended(self, optimizer: Any, reads: Sequence[Read] = ()) -> None:
        """End a step, because an update has ended and no framework reports the steps."""
        if self.framework is not None:
            self._consumed += reads
            return
        if self._leader.leads(optimizer):
            if self._leader.owes:
                self._leader.owes = False
                self.steps += 1
                self.step(self.steps, optimizer)
            self.steps += 1
            self._consumed += reads
            if not self._leader.settled and len(self._watched()) > 1:
                # Another optimizer may be about to finish the same step.
                self._consumed.clear()
            self.step(self.steps, optimizer)
            if len(self._consumers) == 1 and self._leader.settled and not self.losses.judging:
                (self._usual,) = self._consumers.values()
        elif not self._leader.here:
            self._say_once(_OTHER_THREAD)
        elif self._leader.cyclic:
            self._consumed += reads
        else:
            # A different objective from the leader's.
            self._consumed.clear()

    def _unwrapped(self, tensor: Any) -> Any:
        """The program's own tensor, where `torch.func` passes wrapped ones to the engine."""
        if (transforms := self._transforms) is not None:
            while hasattr(tensor, "dim") and transforms.is_functorch_wrapped_tensor(tensor):
                tensor = transforms.get_unwrapped(tensor)
        return tensor

    def _say_once(self, what: str) -> None:
        if self._said.first(what):
            self.adapter.degraded(what)

    def step(self, number: int, optimizer: Any = None, **values: Any) -> None:
        """End a step, as reported by the optimizer or a framework's callback."""
        if self.guard is None:
            self.adapter.quiet(self.begin)
        super().step(number, optimizer, **values)
        if not self._diagnosed and self.guard is not None:
            self._diagnosed = True
            self.guard.diagnose(
                optimized(optimizer),
                accumulation_steps=self.losses.micro_batches,
                model_name=os.path.basename(sys.argv[0]),
            )

    # What a framework reports.

    def trains(self, framework: str, model: Any = None, **settings: Any) -> None:
        """Take steps from this framework's callbacks from now on, because it is starting to
        train."""
        self.framework, self._usual = framework, None
        self.losses.micro_batches = settings.get("accumulation_steps")
        self.adapter.quiet(self.begin)

    def finished(self) -> None:
        super().finished()
        self._usual = None
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


def _has_gradient(optimizer: Any) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def optimized(optimizer: Any) -> Any:
    """A module with the parameters that the optimizer trains, wherever FSDP or DDP put them."""
    import torch

    module = torch.nn.Module()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        if isinstance(parameter, torch.nn.Parameter):
            module.register_parameter(f"p{number}", parameter)
    return module


# Hugging Face's Trainer and Lightning, through their callbacks.


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


def follow_transformers(auto: Auto, module: Any) -> None:
    """Add the guard's callback to every Hugging Face Trainer."""

    def initialised(_: None, trainer: Any, *args: Any, **kwargs: Any) -> None:
        callback_class = importlib.import_module(
            "miner_guard.integrations.transformers"
        ).TransformersCallback
        trainer.pop_callback(callback_class)
        trainer.add_callback(callback_class(auto))

    _after(module.Trainer, "__init__", initialised)
    # The Trainer sums and logs exactly what `training_step` returns, after any normalisation.
    _after(module.Trainer, "training_step", lambda loss, *_, **__: auto.share(loss))


def follow_lightning(auto: Auto, module: Any) -> None:
    """Add the guard's callback to every Lightning Trainer."""

    def initialised(_: None, trainer: Any, *args: Any, **kwargs: Any) -> None:
        callback_class = importlib.import_module(
            "miner_guard.integrations.lightning"
        ).LightningCallback
        trainer.callbacks.insert(0, callback_class(auto))

    def saved(_: None, trainer: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        auto.adapter.quiet(lambda: auto.saved(os.path.abspath(filepath), trainer.global_step))

    _after(module.Trainer, "__init__", initialised)
    save = module.Trainer.save_checkpoint
    module.Trainer.save_checkpoint = in_phase(auto.adapter, save, "checkpoint")
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
        follow(_auto, module)
