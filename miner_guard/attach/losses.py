"""Reads a step's loss, without waiting for the GPU: the sum of what the program passes to
`backward`.

Gradients add up over a step's micro-batches, so this sum is the loss whose gradient the optimizer
applies. If the program calls `(loss / 4).backward()` four times, the sum is the mean. Unless the
graph shows that the program divides its micro-batch losses, the loss is marked as a sum
(`Loss.summed`).
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from miner_guard.rank.steps import Loss

_MAX_DIVISIONS = 4
_MAX_JUDGED_STEPS = 4
"""Maximum number of initial steps used to judge whether the program divides its micro-batch losses.
Walking the graph at every step would cost CPU time."""

_MAX_IN_FLIGHT = 12
"""Limit on the number of steps whose loss is still in transit from the GPU. A record can express a
lag of up to `layout.MAX_LOSS_LAG` steps."""

_MAX_COPIES = 64
"""Limit on the micro-batches of one step whose losses are copied from the GPU."""


class Cuda:
    """The parts of torch that `Losses` needs to read from a GPU. Tests pass a fake."""

    def capturing(self) -> bool:
        """Return whether a CUDA graph is being captured. A copy would become part of the graph, and
        a query would break the capture."""
        import torch

        return torch.cuda.is_current_stream_capturing()

    def copy(self, value: Any) -> tuple[Any, Any]:
        """Start copying a value to the host; returns the copy, and the event that completes when
        it has arrived."""
        import torch

        copied = torch.empty((), dtype=torch.float32, pin_memory=True)
        copied.copy_(value.detach(), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(value.device))
        return copied, event


@dataclass
class _Step:
    """The losses that the program has passed to `backward` in one step."""

    total: float = 0.0
    count: int = 0
    unread: int = 0
    """Number of values that could not be read. If there are any, the loss of the step is
    unknown."""

    copies: list[tuple[Any, Any]] = field(default_factory=list)
    divisors: list[float] = field(default_factory=list)
    number: int = 0
    summed: bool = False


class Losses:
    """Tracks the losses of successive steps, at most 12 of them in transit from the GPU."""

    def __init__(self, device: Any = None) -> None:
        self._device = Cuda() if device is None else device
        self._step = _Step()
        self._in_flight: deque[_Step] = deque()
        self._scaled: tuple[weakref.ref[Any], Any, Any] | None = None
        self._judged = 0
        self._divided = False
        self.micro_batches: int | None = None
        """Micro-batches per step; None until the program divides its loss by that number."""

    def scaled(self, raw: Any, result: Any) -> None:
        """Remember that a GradScaler scaled `raw` to `result`: the program will call `backward` on
        `result`, but the loss is `raw`."""
        if result is not raw and hasattr(raw, "grad_fn"):
            self._scaled = (weakref.ref(result), raw.detach(), raw.grad_fn)

    def note(self, tensor: Any, *, whole: bool = False) -> None:
        """Add `tensor`, which the program calls `backward` on, to the step's loss. `whole`: a
        trainer has already divided the tensor by the number of micro-batches."""
        graph = tensor.grad_fn
        if self._scaled is not None:
            result, raw, raw_graph = self._scaled
            if result() is tensor:
                tensor, graph = raw, raw_graph
            self._scaled = None
        if tensor.dim() != 0:
            return
        step = self._step
        step.count += 1
        if whole:
            self._divided = True
        elif self._judged < _MAX_JUDGED_STEPS and not self._divided:
            step.divisors.append(_divisor(graph))
        value = _local(tensor)
        kind = None if value is None else value.device.type
        if value is not None and kind == "cpu":
            step.total += value.item()
        elif kind == "cuda" and len(step.copies) < _MAX_COPIES and not self._device.capturing():
            # Now, because the program may later average its loss over the ranks in place.
            step.copies.append(self._device.copy(value))
        else:
            step.unread += 1

    def drop(self) -> None:
        """Discard the gathered losses, because they belong to another optimizer or to a step that
        the GradScaler skipped."""
        self._step = _Step()

    def take(self, number: int) -> Loss | None:
        """End step `number`. Return its loss, or that of an earlier step if it has arrived since
        the last call; otherwise None.

        If several losses have arrived, return the latest, but a non-finite one takes precedence.
        """
        step, self._step = self._step, _Step()
        self._judge(step)
        step.number, step.summed = number, step.count > 1 and not self._divided
        if step.count and not step.unread:
            if not step.copies:
                return Loss(step.total, 0, step.summed)
            if len(self._in_flight) < _MAX_IN_FLIGHT:
                self._in_flight.append(step)
        return self._arrived(number)

    def _arrived(self, number: int) -> Loss | None:
        """The loss that has arrived, if any. It queries the events and never waits:
        `event.synchronize()` or `.item()` would stall the step."""
        if not self._in_flight or self._device.capturing():
            return None
        latest: Loss | None = None
        while self._in_flight and all(event.query() for _, event in self._in_flight[0].copies):
            done = self._in_flight.popleft()
            value = done.total + sum(copied.item() for copied, _ in done.copies)
            if latest is None or math.isfinite(latest.value):
                latest = Loss(value, number - done.number, done.summed)
        return latest

    def _judge(self, step: _Step) -> None:
        """Decide whether the program divides each micro-batch's loss by the number of
        micro-batches."""
        if self._judged >= _MAX_JUDGED_STEPS or not step.count or self._divided:
            return
        self._judged += 1
        if step.count > 1 and step.divisors and set(step.divisors) == {step.count}:
            self._divided = True
            self.micro_batches = step.count


def _local(tensor: Any) -> Any:
    """The tensor's value on this rank; None if this rank has only a shard of a DTensor."""
    if not hasattr(tensor, "to_local"):
        return tensor
    if all(placement.is_replicate() for placement in tensor.placements):
        return tensor.detach().to_local()
    return None


def _divisor(graph: Any) -> float:
    """The whole number that a loss was divided by (`loss / 4`, `loss * 0.25`); 1 if it was not."""
    product = 1.0
    # Frameworks may divide more than once: after the Trainer, accelerate divides by one.
    for _ in range(_MAX_DIVISIONS):
        if graph is None or graph.name() not in ("DivBackward0", "MulBackward0"):
            break
        value = _constant(getattr(graph, "_saved_other", None))
        if value and graph.name() == "MulBackward0":
            value = 1 / value
        # Accumulation divides by a whole number of micro-batches; any other divisor is part of the
        # loss itself.
        if value is None or value < 1 or abs(value - round(value)) > 1e-6 * value:
            break
        product *= round(value)
        graph = graph.next_functions[0][0]
    return product


def _constant(other: Any) -> float | None:
    if other is None or other.dim() != 0 or other.device.type != "cpu" or other.requires_grad:
        return None
    return float(other)
