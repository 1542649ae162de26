"""Hooks any unmodified training script: steps from its optimizer, the loss from `backward`, devices
from the optimized parameters.

Hugging Face's Trainer and Lightning report through their callbacks; the optimizer is then not
hooked.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from miner_guard.attach.adapter import NO_PHASE, Adapter, in_phase
from miner_guard.attach.losses import Losses
from miner_guard.rank.introspection.compiled import uncompiled

_OTHERS_IN_A_ROW = 64
"""Without a step of the leader for this many steps of others, another optimizer takes the lead."""


class Leader:
    """Picks which of several optimizers counts the steps; a step ends with the last optimizer of
    its cycle.

    A GAN's generator steps after the discriminator, once for each of its steps: the generator's
    step then ends the training step, so that it includes both losses. DiLoCo's outer optimizer
    steps once per many inner steps, and a critic steps several times per generator step: there the
    more frequent one counts.
    """

    def __init__(self) -> None:
        self._leader: Callable[[], Any] = lambda: None
        self._steps = 0
        self._others = 0
        self._last_other: Callable[[], Any] = lambda: None
        self.cyclic = False
        """Every optimizer steps once per training step: the step's loss is the sum of their
        losses."""

        self.only: Callable[[], Any] = lambda: None
        """The optimizer that has taken the last two steps: `leads` is true for its next one."""

    def leads(self, optimizer: Any) -> bool:
        """Record a step of `optimizer`; return whether it ends a training step."""
        leader = self._leader()
        if leader is None or self._others >= _OTHERS_IN_A_ROW:
            self._leader, leader = weakref.ref(optimizer), optimizer
            self._steps, self._others, self.cyclic = 0, 0, False
        if leader is not optimizer:
            self.only = lambda: None
            self._others += 1
            self._last_other = weakref.ref(optimizer)
            return False
        last = self._last_other()
        if self._steps == 1 and self._others and last is not None:
            # The leader's second step, with others in between: the last of them ends the step from
            # now on.
            self._leader, self._steps, self._others, self.cyclic = self._last_other, 2, 1, True
            return False
        self._steps += 1
        if self._steps > 2 and not self._others:
            self.only = self._leader
        self._others = 0
        return True


class Auto:
    """Follows one training process."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.losses = Losses()
        self.framework: str | None = None
        """The framework whose callbacks report the steps; None: the optimizer does."""

        self.steps = 0
        self._leader = Leader()
        self._stepping_now: list[weakref.ref[Any]] = []
        """Optimizers inside their `step`, innermost last."""

        self._closure_seen = False
        self._diagnosed = False
        self._evaluated: float | None = None
        self._backward_phase: AbstractContextManager[Any] = NO_PHASE
        self._optimizer_phase: AbstractContextManager[Any] = NO_PHASE

    # a plain loop

    def follow_torch(self, module: Any) -> None:
        """`torch.optim.optimizer` was imported."""
        from torch import Tensor

        module.register_optimizer_step_pre_hook(uncompiled(self._stepping))
        module.register_optimizer_step_post_hook(uncompiled(self._stepped))
        backward: Any = Tensor.backward

        @uncompiled
        @functools.wraps(backward)
        def followed(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                self._backward(tensor)
            except Exception as error:  # noqa: BLE001 - the program must not notice; reported as guard_degraded
                self.adapter.failed("backward", error)
            with self._backward_phase:
                return backward(tensor, *args, **kwargs)

        setattr(Tensor, "backward", followed)  # noqa: B010 - mypy takes no assigned method

    def follow_scaler(self, module: Any) -> None:
        """`torch.amp.grad_scaler` was imported: the program calls backward on the loss times a
        varying scale."""
        scaler = module.GradScaler
        scale, update = scaler.scale, scaler.update

        @functools.wraps(scale)
        def scaled(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            self.adapter.quiet(self.losses.scaled, outputs, result)
            return result

        @functools.wraps(update)
        def updated(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            # The scaler found infinite gradients and no optimizer stepped: the next step gathers
            # new losses.
            self.losses.drop()
            return update(scaler, *args, **kwargs)

        scaler.scale, scaler.update = uncompiled(scaled), uncompiled(updated)

    def follow_data(self, module: Any) -> None:
        """`torch.utils.data.dataloader` was imported."""
        loader = module._BaseDataLoaderIter
        loader.__next__ = in_phase(self.adapter, loader.__next__, "data")

    def _backward(self, tensor: Any) -> None:
        # Not at import: launchers and dataloaders import torch too.
        if self.adapter.guard is None:
            self.begin()
        if self.framework == "transformers":
            return
        if self._stepping_now:
            # LBFGS evaluates its closure many times per step; `step` returns the first value.
            if self._closure_seen:
                return
            self._closure_seen = True
        self.losses.note(tensor)

    def begin(self) -> None:
        """This process trains: set up its guard."""
        if self.adapter.guard is None:
            self.adapter.begin(agree=False)
            self._backward_phase = self.adapter.phase("backward")
            self._optimizer_phase = self.adapter.phase("optimizer")

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        while self._stepping_now and any(each() is optimizer for each in self._stepping_now):
            # Its last step raised and was retried, so the post-step hook never ran.
            self._leave()
        self._stepping_now.append(weakref.ref(optimizer))
        self._closure_seen = False
        self._optimizer_phase.__enter__()

    def _leave(self) -> None:
        self._stepping_now.pop()
        self._optimizer_phase.__exit__(None, None, None)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._stepping_now:
            self._stepping_now.pop()
            self._optimizer_phase.__exit__(None, None, None)
        if self.framework is not None:
            return
        if self._leader.only() is optimizer or self._leader.leads(optimizer):
            self.steps += 1
            try:
                self._step(self.steps, optimizer)
            except Exception as error:  # noqa: BLE001 - the program must not notice; reported as guard_degraded
                self.adapter.failed("step", error)
        elif not self._leader.cyclic:
            # A different objective from the one that the leader steps on.
            self.losses.drop()

    def step(self, number: int, optimizer: Any) -> None:
        """End a step, as reported by the optimizer or a framework's callback."""
        self.adapter.quiet(self._step, number, optimizer)

    def _step(self, number: int, optimizer: Any) -> None:
        guard = self.adapter.guard
        if guard is not None and self._diagnosed and self._evaluated is None:
            # Most steps, in as few functions as possible: after a long step each one is cold.
            plain, lr = self.losses.plain(), optimizer.param_groups[0].get("lr")
            if plain is not None:
                if not guard.plain_step(number, plain, lr):
                    guard.step(inner_step=number, loss=plain, lr=lr)
                return
        self.begin()
        guard = self.adapter.guard
        assert guard is not None
        loss = self.losses.take(number)
        # Fast path for most steps: a plain number.
        remarks = loss is not None and (loss.steps_ago or loss.summed)
        given = loss.value if loss is not None and not remarks else loss
        evaluated, self._evaluated = self._evaluated, None
        guard.step(
            inner_step=number,
            loss=given,
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

    # reported by a framework (adapter.StepListener)

    def trains(self, framework: str) -> None:
        """A framework starts training: its callbacks report the steps from now on."""
        self.framework = framework
        self.adapter.quiet(self.begin)

    def share(self, loss: Any) -> None:
        """Take what a micro-batch adds to the loss that the framework logs."""
        self.adapter.quiet(functools.partial(self.losses.note, whole=True), loss)

    def accumulates(self, micro_batches: int) -> None:
        """A framework reports the number of micro-batches per step."""
        self.losses.micro_batches = micro_batches

    def evaluated(self, loss: float | None) -> None:
        """A framework has evaluated; the loss is recorded with the next step."""
        self._evaluated = loss

    def saved(self, path: str, number: int) -> None:
        """A framework has saved a checkpoint."""
        guard = self.adapter.guard
        if guard is not None and guard.rank == 0:
            guard.checkpoint_saved(path, step=number)

    def finished(self) -> None:
        """A framework reports that it reached its configured end."""
        if self.adapter.guard is not None:
            self.adapter.quiet(self.adapter.guard.close, True)
            self.adapter.guard = None
            self._backward_phase = self._optimizer_phase = NO_PHASE


def optimized(optimizer: Any) -> Any:
    """The parameters that the optimizer trains, as one module, wherever FSDP or DDP put them."""
    import torch

    module = torch.nn.Module()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        if isinstance(parameter, torch.nn.Parameter):
            module.register_parameter(f"p{number}", parameter)
    return module


_auto = Auto(Adapter("auto"))


def imported(name: str, module: Any) -> None:
    """Called by the sitecustomize after it sees one of the watched modules imported."""
    if name == "torch.optim.optimizer":
        _auto.follow_torch(module)
    elif name == "torch.amp.grad_scaler":
        _auto.follow_scaler(module)
    elif name == "torch.utils.data.dataloader":
        _auto.follow_data(module)
    else:
        from miner_guard.attach import frameworks

        follow = (
            frameworks.follow_transformers
            if name == "transformers.trainer"
            else frameworks.follow_lightning
        )
        follow(_auto.adapter, _auto, module)
