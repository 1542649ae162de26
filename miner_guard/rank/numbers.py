"""Converts the values that the training loop reports to numbers, without waiting for the GPU. Never
imports torch."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

MAX_INT = 1 << 63
"""Step numbers in a record satisfy -MAX_INT <= n < MAX_INT."""


class Loss(NamedTuple):
    """A loss and where it came from, for `step(loss=…)`."""

    value: float
    steps_ago: int = 0
    """How many steps ago the loss was computed; a loss copied from the GPU arrives late."""

    summed: bool = False
    """Whether it is the sum of all losses passed to `backward` during the step; the program may
    display a different number."""


class NotRead(Exception):
    """Reading this value would force a synchronisation or a collective. The message says what to
    pass instead."""


def number(name: str, value: Any) -> tuple[float, str | None]:
    """Return `value` as a float and, if it is a tensor, its device type.

    Raises NotRead if reading would need a synchronisation or a collective, and ValueError or
    TypeError if `value` is not a number.
    """
    device = getattr(getattr(value, "device", None), "type", None)
    if device is None:
        return float(value), None
    if hasattr(value, "to_local"):
        raise NotRead(
            f"{name} is a DTensor: reading it would need a collective, so it is not recorded; "
            "pass a float"
        )
    if device != "cpu":
        raise NotRead(
            f"{name} is a tensor on {device}: reading it would force a synchronisation, so it is "
            "not recorded; pass a float"
        )
    # Detach first: torch warns at each step about a loss that still has its graph, and a program
    # may turn warnings into errors.
    detach = getattr(value, "detach", None)
    return float(value if detach is None else detach()), "cpu"


def whole(value: Any) -> int:
    """Return a step number as an int.

    Raises NotRead for a tensor on the GPU, ValueError if the number does not fit a record, and
    ValueError, TypeError or OverflowError if `value` is not a whole number.
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
    """Figures from one GPU's caching allocator, in bytes."""

    allocated: float
    reserved: float
    peak: float | None
    """Peak of the allocated bytes since the program started or reset the counter."""


_GROWTH = 1.05
"""Report a peak only if it exceeds the last reported one by this factor."""


class CudaMemory:
    """Memory of the GPU that this rank uses, read without synchronising."""

    def __init__(self) -> None:
        self._device: int | None = None
        """Index of the GPU; None means the current device."""

        self._last: GpuMemory | None = None
        self._reported = 0.0

    def read(self) -> tuple[float | None, float | None]:
        """Return allocated and reserved bytes; (None, None) if CUDA is not in use.

        A program may name its device (`cuda:3`) without making it current. If nothing is allocated
        on the current device, this reads the one with the most allocated memory.
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
        """The last reading if its peak is well above the one returned last; otherwise None."""
        last = self._last
        if last is None or not last.peak or last.peak < _GROWTH * self._reported:
            return None
        self._reported = last.peak
        return last


def _memory_of(cuda: Any, device: int | None) -> GpuMemory | None:
    # Read the nested statistics: `memory_allocated` flattens and sorts them, which takes 80-100 us.
    stats = cuda.memory_stats_as_nested_dict(device)
    if not stats:
        # The caching allocator is switched off (PYTORCH_NO_CUDA_MEMORY_CACHING) and counts nothing.
        return None
    allocated = stats["allocated_bytes"]["all"]
    return GpuMemory(
        float(allocated["current"]),
        float(stats["reserved_bytes"]["all"]["current"]),
        allocated.get("peak"),
    )


def cuda_in_use() -> bool:
    """Return whether this process has a CUDA context."""
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())
