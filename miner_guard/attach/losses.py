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

_SLOTS = 512
"""Number of floats in pinned memory, for the micro-batches of all steps in flight."""


class Cuda:
    """The parts of torch that `Losses` needs to read from a GPU. Tests pass a fake."""

    def capturing(self) -> bool:
        """Return whether a CUDA graph is being captured. A copy would become part of the graph, and
        a query would break the capture."""
        import torch

        return torch.cuda.is_current_stream_capturing()

    def stream(self, device: Any) -> Any:
        import torch

        return torch.cuda.current_stream(device)

    def slots(self, count: int) -> list[Any]:
        import torch

        return list(torch.empty(count, dtype=torch.float32, pin_memory=True).unbind())

    def event(self) -> Any:
        import torch

        return torch.cuda.Event()  # type: ignore[no-untyped-call]


@dataclass
class _Gathered:
    """The losses that the program has passed to `backward` in the current step."""

    total: float = 0.0
    count: int = 0
    unread: int = 0
    """Number of values that could not be read. If there are any, the loss of the step is
    unknown."""

    slots: list[int] = field(default_factory=list)
    stream: Any = None
    divisors: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _InFlight:
    step: int
    total: float
    slots: list[int]
    event: Any
    summed: bool


class Losses:
    """Tracks the losses of successive steps. Uses 512 pinned floats, for at most 12 steps in
    flight."""

    def __init__(self, device: Any = None) -> None:
        self._device = Cuda() if device is None else device
        self._gathered = _Gathered()
        self._slots: list[Any] = []
        self._free: deque[int] = deque()
        self._in_flight: deque[_InFlight] = deque()
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
        gathered = self._gathered
        gathered.count += 1
        if whole:
            self._divided = True
        elif self._judged < _MAX_JUDGED_STEPS and not self._divided:
            gathered.divisors.append(_divisor(graph))
        self._read(tensor, gathered)

    def _read(self, tensor: Any, gathered: _Gathered) -> None:
        value = _local(tensor)
        kind = None if value is None else value.device.type
        if value is not None and kind == "cpu":
            gathered.total += value.item()
        elif kind != "cuda" or not self._copy(value, gathered):
            gathered.unread += 1

    def _copy(self, value: Any, gathered: _Gathered) -> bool:
        """Start copying the value to the host. Do it immediately, because the program may later
        average its loss over the ranks in place. Returns False if that is not possible."""
        if self._device.capturing():
            return False
        if not self._slots:
            self._slots = self._device.slots(_SLOTS)
            self._free = deque(range(_SLOTS))
        stream = self._device.stream(value.device)
        if not self._free or (gathered.stream is not None and stream != gathered.stream):
            # One event marks the end of all copies of a step, so they must be on one stream.
            return False
        slot = self._free.popleft()
        gathered.slots.append(slot)
        gathered.stream = stream
        self._slots[slot].copy_(value.detach(), non_blocking=True)
        return True

    def drop(self) -> None:
        """Discard the gathered losses, because they belong to another optimizer or to a step that
        the GradScaler skipped."""
        self._free.extend(self._gathered.slots)
        self._gathered = _Gathered()

    def take(self, step: int) -> Loss | None:
        """End step `step`. Return its loss, or that of an earlier step if it has arrived since the
        last call; otherwise None.

        If several losses have arrived, return the latest, but a non-finite one takes precedence.
        """
        gathered, self._gathered = self._gathered, _Gathered()
        self._judge(gathered)
        summed = gathered.count > 1 and not self._divided
        if gathered.count == 0 or gathered.unread:
            self._free.extend(gathered.slots)
        elif not gathered.slots:
            return Loss(gathered.total, 0, summed)
        else:
            self._send(step, gathered, summed)
        return self._arrived(step)

    def _send(self, step: int, gathered: _Gathered, summed: bool) -> None:
        if len(self._in_flight) >= _MAX_IN_FLIGHT or self._device.capturing():
            self._free.extend(gathered.slots)
            return
        event = self._device.event()
        event.record(gathered.stream)
        self._in_flight.append(_InFlight(step, gathered.total, gathered.slots, event, summed))

    def _arrived(self, step: int) -> Loss | None:
        """The loss that has arrived, if any. It queries the event and never waits:
        `event.synchronize()` or `.item()` would stall the step."""
        if not self._in_flight or self._device.capturing():
            return None
        latest: Loss | None = None
        while self._in_flight and self._in_flight[0].event.query():
            done = self._in_flight.popleft()
            value = done.total + sum(self._slots[slot].item() for slot in done.slots)
            self._free.extend(done.slots)
            if latest is None or math.isfinite(latest.value):
                latest = Loss(value, step - done.step, done.summed)
        return latest

    def _judge(self, gathered: _Gathered) -> None:
        """Decide whether the program divides each micro-batch's loss by the number of
        micro-batches."""
        if self._judged >= _MAX_JUDGED_STEPS or not gathered.count or self._divided:
            return
        self._judged += 1
        if gathered.count > 1 and gathered.divisors and set(gathered.divisors) == {gathered.count}:
            self._divided = True
            self.micro_batches = gathered.count


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
