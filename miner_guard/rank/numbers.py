"""Converts what the training loop holds to numbers, without waiting for the GPU. Never imports
torch."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

MAX_INT = 1 << 63
"""Step numbers in a record satisfy -MAX_INT <= n < MAX_INT."""


class Loss(NamedTuple):
    """A loss and its provenance, for `step(loss=…)`."""

    value: float
    steps_ago: int = 0
    """How many steps ago the loss arose: read from a GPU without waiting, it arrives late."""

    summed: bool = False
    """It is the sum of all that was passed to `backward` in the step; the program may display
    another number."""


class NotRead(Exception):
    """Reading this value would cost a synchronisation or a collective; the message says what to
    pass instead."""


def number(name: str, value: Any) -> tuple[float, str | None]:
    """`value` as a float and, for a tensor, its device type.

    Raises NotRead if reading would synchronise, ValueError and TypeError if `value` is not a
    number.
    """
    device = getattr(getattr(value, "device", None), "type", None)
    if device is None:
        return float(value), None
    if hasattr(value, "to_local"):
        raise NotRead(f"{name} is a DTensor, whose value needs a collective; pass a float")
    if device != "cpu":
        raise NotRead(
            f"{name} is a tensor on {device}, whose value needs a synchronisation; pass a float"
        )
    # Detach first: torch warns at each step about a loss that still has its graph, and a program
    # may turn warnings into errors.
    detach = getattr(value, "detach", None)
    return float(value if detach is None else detach()), "cpu"


def whole(value: Any) -> int:
    """A step number as an int.

    Raises NotRead for a tensor on the GPU; ValueError, TypeError and OverflowError for anything but
    a whole number, ValueError also for one that does not fit a record.
    """
    if getattr(getattr(value, "device", None), "type", "cpu") != "cpu":
        raise NotRead("a step number is a tensor on the GPU; pass an int")
    number = int(value)
    if not -MAX_INT <= number < MAX_INT:
        raise ValueError(
            f"step number too large: {len(str(abs(number)))} digits (max {len(str(MAX_INT))})"
        )
    return number


class GpuMemory(NamedTuple):
    """Bytes of the caching allocator of one GPU."""

    allocated: float
    reserved: float
    peak: float | None
    """The most that was allocated at a time, since the program started or reset the counter."""


_GROWTH = 1.05
"""A peak is worth a report once it exceeds the last reported one by this factor."""


class CudaMemory:
    """Memory of the GPU that this rank uses, read without synchronising."""

    def __init__(self) -> None:
        self._device: int | None = None
        """None: the current one."""

        self._last: GpuMemory | None = None
        self._reported = 0.0

    def read(self) -> tuple[float | None, float | None]:
        """Allocated and reserved bytes; None if CUDA is not in use.

        A program that names its device (`cuda:3`) need not make it current: if nothing is allocated
        on the current device, read the one with the most.
        """
        cuda = sys.modules.get("torch.cuda")
        if cuda is None or not cuda.is_initialized():
            return None, None
        memory = _memory_of(cuda, self._device)
        if memory is not None and memory.allocated == 0:
            count = cuda.device_count()
            used = {index: _memory_of(cuda, index) for index in range(count)}
            fullest = max(
                (index for index, found in used.items() if found is not None and found.allocated),
                key=lambda index: used[index] or (),
                default=None,
            )
            if fullest is not None:
                self._device, memory = fullest, used[fullest]
        self._last = memory
        return (None, None) if memory is None else (memory.allocated, memory.reserved)

    def new_peak(self) -> GpuMemory | None:
        """The last reading, if its peak is well above the one returned before."""
        last = self._last
        if last is None or not last.peak or last.peak < _GROWTH * self._reported:
            return None
        self._reported = last.peak
        return last


def _memory_of(cuda: Any, device: int | None) -> GpuMemory | None:
    # The nested form skips the flattening and sorting that make `memory_allocated` take 80-100 us.
    stats = cuda.memory_stats_as_nested_dict(device)
    if not stats:
        # The caching allocator is off (PYTORCH_NO_CUDA_MEMORY_CACHING) and counts nothing.
        return None
    allocated = stats["allocated_bytes"]["all"]
    return GpuMemory(
        float(allocated["current"]),
        float(stats["reserved_bytes"]["all"]["current"]),
        allocated.get("peak"),
    )


def cuda_in_use() -> bool:
    """Whether this process has a CUDA context."""
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())
