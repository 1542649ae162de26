"""Reads a step's loss, without waiting for the GPU: the sum of the losses whose gradients its
update consumed.

Gradients add up over a step's micro-batches, so this sum is the loss whose gradient the optimizer
applies. If the program calls `(loss / 4).backward()` four times, the sum is the mean. Unless the
graph shows that the program divides its micro-batch losses, the loss is marked as a sum
(`Loss.summed`).
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(eq=False, slots=True)
class Read:
    """One loss: its value, or a copy of it on its way from the GPU; unknown without both."""

    value: float | None = None
    copy: tuple[Any, Any] | None = None
    divisor: float = 1.0
    """The whole number that the program divided it by."""

    whole: bool = False
    """Whether a trainer has already divided it by the number of micro-batches."""


@dataclass
class _Step:
    """The losses of one step while they are on their way from the GPU."""

    number: int
    total: float
    copies: list[tuple[Any, Any]]
    summed: bool


class Losses:
    """Reads losses and adds up those of successive steps, at most 12 of them in transit from the
    GPU."""

    def __init__(self, device: Any = None) -> None:
        self._device = Cuda() if device is None else device
        self._in_flight: deque[_Step] = deque()
        self._copying = 0
        self._scaled: tuple[weakref.ref[Any], Any, Any] | None = None
        self._judged = 0
        self._divided = False
        self.judging = True
        """Whether it is still unknown if the program divides its micro-batch losses."""

        self.micro_batches: int | None = None
        """Micro-batches per step; None until the program divides its loss by that number."""

    def scaled(self, raw: Any, result: Any) -> None:
        """Remember that a GradScaler scaled `raw` to `result`: the program will call `backward` on
        `result`, but the loss is `raw`."""
        if result is not raw and hasattr(raw, "grad_fn"):
            self._scaled = (weakref.ref(result), raw.detach(), raw.grad_fn)

    def read(self, tensor: Any, *, whole: bool = False) -> Read | None:
        """Read a loss now, because the program may later average it over the ranks in place; None
        for what is not a scalar."""
        graph = None
        if self._scaled is not None:
            result, raw, raw_graph = self._scaled
            if result() is tensor:
                tensor, graph = raw, raw_graph
            self._scaled = None
        if tensor.dim() != 0:
            return None
        read = Read(whole=whole)
        if not whole and self.judging:
            read.divisor = _divisor(graph or tensor.grad_fn)
        value = _local(tensor) if hasattr(tensor, "to_local") else tensor
        kind = None if value is None else value.device.type
        if kind == "cpu":
            read.value = value.item()
        elif kind == "cuda" and self._copying < _MAX_COPIES and not self._device.capturing():
            self._copying += 1
            read.copy = self._device.copy(value)
        return read

    def take(self, number: int, reads: Sequence[Read]) -> Loss | None:
        """End step `number`, which consumed these losses. Return its loss, or that of an earlier
        step if it has arrived since the last call; otherwise None.

        If several losses have arrived, return the latest, but a non-finite one takes precedence.
        """
        self._copying = 0
        if len(reads) > 1:
            # Two optimizers may consume the gradients of one loss.
            reads = list(dict.fromkeys(reads))
        if self.judging:
            self._judge(reads)
        if len(reads) == 1 and reads[0].value is not None:
            return Loss(reads[0].value)
        copies = [read.copy for read in reads if read.copy is not None]
        total = sum(read.value for read in reads if read.value is not None)
        if reads and all(read.value is not None or read.copy is not None for read in reads):
            summed = len(reads) > 1 and not self._divided
            if not copies:
                return Loss(total, 0, summed)
            if len(self._in_flight) < _MAX_IN_FLIGHT:
                self._in_flight.append(_Step(number, total, copies, summed))
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

    def _judge(self, reads: Sequence[Read]) -> None:
        """Decide whether the program divides each micro-batch's loss by the number of
        micro-batches."""
        if not reads:
            return
        self._judged += 1
        if any(read.whole for read in reads):
            self._divided = True
        elif len(reads) > 1 and {read.divisor for read in reads} == {len(reads)}:
            self._divided, self.micro_batches = True, len(reads)
        self.judging = self._judged < _MAX_JUDGED_STEPS and not self._divided


def _local(tensor: Any) -> Any:
    """A DTensor's value on this rank; None if this rank has only a shard of it."""
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
        if value is None or not 1 <= value < math.inf or abs(value - round(value)) > 1e-6 * value:
            break
        product *= round(value)
        graph = graph.next_functions[0][0]
    return product


def _constant(other: Any) -> float | None:
    if other is None or other.dim() != 0 or other.device.type != "cpu" or other.requires_grad:
        return None
    return float(other)
