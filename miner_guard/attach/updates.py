"""Ties losses to the updates that consume them, by watching parameters instead of calls.

A loss counts once its gradient has reached the parameters and an update has consumed it. A loss
whose gradients the program drops first (`zero_grad` after a probe) never counts.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from miner_guard.rank.losses import Read

_SAMPLES = 2
"""Parameters watched for each optimizer, spread evenly; watching all would cost a step too much."""

_MAX_READS = 4096
"""Limit on the losses that wait for an update."""

_ELEMENTS = 64
"""Elements of a parameter that show an update made through `.data`, which no version counts."""

_MAX_NODES = 20_000
"""Limit on the nodes of a graph that are searched for its parameters."""

_TURNS = 64
"""Once the other optimizers have taken this many steps since the leader's last one, one of them
becomes the leader."""

_CYCLE_BEGINS = 2
"""The leader's count of steps when optimizers are found to take turns."""

_Mark = tuple[int, int] | None


class Consumer:
    """The parameters of one optimizer, and the losses whose gradients wait in them."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self.reads: list[Read] = []
        self.offered: list[Read] = []
        """Losses whose gradients `autograd.grad` has returned; they count if the program makes them
        the parameters' gradients."""

        self.optimizer: Callable[[], Any] = lambda: None
        """A weak reference to it."""

        self.thread: int | None = None
        """The thread that steps this optimizer; None before its first step."""

        self.inside = False
        """Whether its steps are taken inside a backward."""

        self.fed = False
        """Whether there were gradients when its step began."""

        self.unsure = False
        """Whether a loss may or may not be among `reads`, so that the step's loss is unknown."""

        self._stepping = self._evaluated = self._closed = False
        """Whether its step runs, a closure has been evaluated in it, and was evaluated again."""

        self._before: list[_Mark] = []
        self.watch(parameters)

    def watch(self, parameters: Sequence[Any]) -> None:
        """Take samples of the parameters."""
        stride = max(1, -(-len(parameters) // _SAMPLES))
        chosen = [*parameters[::stride], *parameters[-1:]]
        self._samples = [weakref.ref(each) for each in chosen]
        self.sharded = any(hasattr(p, "to_local") or hasattr(p, "_local_shard") for p in chosen)
        """Whether FSDP may hold back the gradients of a micro-batch until the last one."""

        self._marks = self._read_marks()

    def watches(self, parameter: Any) -> bool:
        return any(sample() is parameter for sample in self._samples)

    def holds_first(self, parameters: Sequence[Any]) -> bool:
        """Whether the optimizer's first parameter, if it has one, is the one that is watched."""
        if not parameters:
            return True
        return bool(self._samples) and self._samples[0]() is parameters[0]

    def begin_backward(self) -> None:
        self._before = marks = self._read_marks()
        if self.reads:
            self._forget_dropped(marks)

    def arrived(self, reads: Sequence[Read]) -> bool:
        """A backward has ended; return whether it changed these parameters' gradients."""
        self._marks = self._read_marks()
        if self._marks == self._before:
            return False
        if not self._closed:
            self._add(reads)
            self._evaluated = self._stepping
        return True

    def begin_step(self) -> None:
        """An update is about to consume the gradients."""
        self._stepping = True
        if self._samples and (mark := self._marks[0]) is not None and not self.offered:
            parameter = self._samples[0]()
            if parameter is not None and id(parameter.grad) == mark[0]:
                # The usual case: the gradient of the last backward.
                self.fed = True
                return
        marks = self._read_marks()
        if self.reads:
            self._forget_dropped(marks, zeroed=False)
        if len(self.offered) == 1 and not self.reads and marks != self._marks:
            self.reads = self.offered
        self._marks = marks
        self.fed = any(marks)

    def end_step(self) -> list[Read]:
        """Return the losses that the update consumed."""
        reads, self.reads, self.offered = self.reads, [], []
        if self.unsure:
            reads.append(Read())
        self.unsure = self._stepping = self._evaluated = self._closed = False
        return reads

    def _read_marks(self) -> list[_Mark]:
        """Identity and version of each gradient: each backward changes one of the two."""
        if self.sharded:
            # FSDP2 adds to the local tensor, which does not change the DTensor's version.
            return [
                None
                if (parameter := sample()) is None or (gradient := parameter.grad) is None
                else (id(gradient), getattr(gradient, "_local_tensor", gradient)._version)
                for sample in self._samples
            ]
        return [
            None
            if (parameter := sample()) is None or (gradient := parameter.grad) is None
            else (id(gradient), gradient._version)
            for sample in self._samples
        ]

    def _add(self, reads: Sequence[Read]) -> None:
        if len(self.reads) < _MAX_READS:
            self.reads += reads
        else:
            self.unsure = True

    def _forget_dropped(self, marks: Sequence[_Mark], *, zeroed: bool = True) -> None:
        """Forget the waiting losses if the program has dropped or replaced their gradients.
        `zeroed`: whether gradients that changed in place may have been set to zero."""
        if not any(self._marks):
            return
        for sample, old, new in zip(self._samples, self._marks, marks, strict=True):
            if old is None or new is None or old[0] != new[0]:
                continue
            parameter = sample()
            if old == new or not zeroed or parameter is None:
                return
            if parameter.grad.device.type != "cpu":
                self.unsure = True
                return
            if parameter.grad.any():
                return
        if self._evaluated:
            # LBFGS evaluates its closure many times per step; `step` returns the first value.
            self._closed = True
        else:
            self.reads.clear()


class Observed(Consumer):
    """The parameters of a program that has no optimizer of torch's. Its updates show when the next
    backward begins, or when the program ends."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        super().__init__(parameters)
        self._all = {id(parameter): weakref.ref(parameter) for parameter in parameters}
        self._state = self._read_state()

    def arrived(self, reads: Sequence[Read]) -> bool:
        self._state = self._read_state()
        return super().arrived(reads)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As in torch's optimizers."""
        return [{"params": [p for each in self._all.values() if (p := each()) is not None]}]

    def holds(self, parameter: Any) -> bool:
        held = self._all.get(id(parameter))
        return held is not None and held() is parameter

    def offer(self, reads: Sequence[Read]) -> None:
        """`autograd.grad` has returned gradients of these losses."""
        self._state = self._read_state()
        self.offered += reads

    def updated(self) -> bool:
        """Whether the parameters have changed since the last backward."""
        states = zip(self._state, self._read_state(), strict=True)
        return any(new is not None and new != old for old, new in states)

    def end_step(self) -> list[Read]:
        self._state = self._read_state()
        if not self.reads and len(self.offered) == 1:
            self.reads = self.offered
        return super().end_step()

    def _read_state(self) -> list[Any]:
        return [_state(sample()) for sample in self._samples]


def _state(parameter: Any) -> Any:
    if parameter is None or parameter.device.type != "cpu":
        return getattr(parameter, "_version", None)
    values = parameter.detach().reshape(-1)
    return values[:: max(1, values.numel() // _ELEMENTS)].tolist()


def leaves(tensor: Any) -> list[Any]:
    """The parameters that a loss depends on."""
    parameters: dict[int, Any] = {}
    visited: set[Any] = set()
    open_nodes = [tensor.grad_fn]
    while open_nodes and len(visited) < _MAX_NODES:
        node = open_nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            parameters[id(variable)] = variable
        open_nodes += [following for following, _ in node.next_functions]
    return list(parameters.values())


class Leader:
    """Decides which of several optimizers counts the training steps.

    If the optimizers take turns, as in a GAN, the last one of each cycle ends the training step, so
    that the step includes the losses of all of them. If one steps more often than the others, it
    counts the training steps: DiLoCo's inner optimizer steps many times per outer step, and a
    critic several times per generator step. If one takes over from another, as where layers train
    one after the other, so does the count. An optimizer in another thread takes no turn.
    """

    def __init__(self, thread: Callable[[], int] = threading.get_ident) -> None:
        self._thread = thread
        self._leader: Callable[[], Any] = lambda: None
        self._owner = 0
        self._steps = 0
        self._others = 0
        self._last_other: Callable[[], Any] = lambda: None
        self._turn: set[int] = set()
        """The other optimizers that have stepped since the leader's last step."""

        self.owes = False
        """Whether a step that was taken for a part of a cycle is still to be counted."""

        self.cyclic = False
        """Whether every optimizer steps once per training step; the step's loss is then the sum of
        their losses."""

    def leads(self, optimizer: Any) -> bool:
        """Record a step of `optimizer`; return whether it ends a training step."""
        leader = self._leader()
        if leader is optimizer and not self._others:
            self._steps += 1
            return True
        thread = self._thread()
        if leader is None or self._others >= _TURNS:
            self._leader, leader, self._owner = weakref.ref(optimizer), optimizer, thread
            self._steps, self._others, self.cyclic = 0, 0, False
            self._last_other = lambda: None
        if leader is not optimizer:
            self._others += 1
            if thread != self._owner:
                return False
            if id(optimizer) in self._turn:
                # It has stepped twice since the leader has: it steps more often, or trains what is
                # left after the leader has finished. Its step before this one has not been counted.
                self.owes = not self.cyclic or self._steps == _CYCLE_BEGINS
                self._leader, self._steps, self._others = weakref.ref(optimizer), 2, 0
                self.cyclic = False
                self._turn.clear()
                return True
            self._turn.add(id(optimizer))
            self._last_other = weakref.ref(optimizer)
            return False
        last = self._last_other()
        if self._steps == 1 and self._others and last is not None:
            # This is the leader's second step, with others in between: from now on, the last of
            # those ends the training step.
            self._leader, self._steps = self._last_other, _CYCLE_BEGINS
            self._others, self.cyclic, self._turn = 1, True, {id(optimizer)}
            return False
        self._steps += 1
        self._others = 0
        self._turn.clear()
        return True

    @property
    def here(self) -> bool:
        """Whether this thread takes the steps."""
        return self._thread() == self._owner

    @property
    def settled(self) -> bool:
        """Whether it is known how the optimizers take turns."""
        return self._steps > 1
