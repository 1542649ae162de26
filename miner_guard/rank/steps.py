"""Ends an inner step: builds one record from what the training loop reports and what the hook
measures, without waiting for the GPU. Never imports torch.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple, TypeVar

from miner_guard.rank import layout
from miner_guard.rank.environment import RankContext, loaded_module
from miner_guard.rank.layout import NAN
from miner_guard.rank.phases import Phases
from miner_guard.rank.recorder import Recorder
from miner_guard.record.events import event
from miner_guard.record.words import gb, or_unknown
from miner_guard.system.clock import without_reentry

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
        self._cuda: Any = None
        """`torch.cuda`, once the program has imported it."""

        self._device: int | None = None
        """Index of the GPU; None means the current device."""

        self._last: GpuMemory | None = None
        self._reported = 0.0

    def read(self) -> tuple[float | None, float | None]:
        """Return allocated and reserved bytes; (None, None) if CUDA is not in use.

        A program may name its device (`cuda:3`) without making it current. If nothing is allocated
        on the current device, this reads the one with the most allocated memory.
        """
        if (cuda := self._cuda) is None:
            cuda = self._cuda = loaded_module("torch.cuda")
        if cuda is None or not cuda.is_initialized():
            return None, None
        memory = _memory_of(cuda, self._device)
        if memory is not None and memory.allocated == 0:
            for index in range(cuda.device_count()):
                other = _memory_of(cuda, index)
                if other is not None and other.allocated > memory.allocated:
                    self._device, memory = index, other
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
    cuda = loaded_module("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())


T = TypeVar("T")

_RECENT_LOSSES = 64
_PEAK_FROM_STEP = 3
"""Ignore peaks before this step: the optimizer allocates its state in the first step."""

_PEAK_EVERY_S = 60.0

Reported = tuple[Any, Any, Any, Any, Any, Any, Any, Any]
"""What the training loop reports, of any type: outer step, inner step, total steps, loss, lr,
grad_norm, eval_loss, tokens."""

Report = Callable[[str, BaseException], None]


class Stepper:
    """Records each step. It calls `report` for each value that it cannot read, and records the
    others."""

    def __init__(self, place: RankContext, recorder: Recorder, report: Report) -> None:
        self.losses: deque[float] = deque(maxlen=_RECENT_LOSSES)
        self._recorder = recorder
        self._report = report
        self._memory = CudaMemory()
        self._wall = without_reentry(time.time)
        self._rank = place.rank
        self._peak_at = 0.0
        """Monotonic time from which the next peak may be reported."""

        expect = place.settings.gpu.expect
        self._cuda_expected = isinstance(expect, int) and expect > 0
        allowances = place.settings.hang.allowances
        self.phases = Phases(recorder.flight, recorder.monotonic, allowances)

    @property
    def count(self) -> int:
        return self.phases.count

    def end(self, reported: Reported) -> None:
        """End the step now and record it."""
        outer, inner, total, loss, lr, norm, evaluated, tokens = reported
        phases, recorder = self.phases, self._recorder
        now, flags = recorder.monotonic(), 0 if phases.count else layout.FLAG_FIRST
        if lr is not None and type(lr) is not float:
            lr = self.as_float("lr", lr)
        if norm is not None and (norm := self.as_float("grad_norm", norm)) is not None:
            flags |= layout.FLAG_GRAD_NORM_GIVEN
        if evaluated is not None:
            evaluated = self.as_float("eval_loss", evaluated)
            flags |= 0 if evaluated is None else layout.FLAG_EVAL_LOSS_GIVEN
        if loss is not None:
            loss, more = self._read_loss(loss, norm)
            flags |= more
        if not phases.stack:
            # The training thread, even if another one created the guard.
            phases.owner = get_ident()
        started, seconds, nested, more = phases.end_step(now)
        try:
            allocated, reserved = self._memory.read()
        except Exception as error:  # noqa: BLE001 - CUDA may be broken; it is reported
            allocated = reserved = None
            self._report("cuda_memory", error)
        values = (
            -1 if outer is None else self._count("outer_step", outer),
            -1 if inner is None else self._count("inner_step", inner),
            phases.count if total is None else self._count("total_steps", total),
            started,
            now,
            self._wall(),
            NAN if loss is None else loss,
            NAN if lr is None else lr,
            NAN if norm is None else norm,
            NAN if evaluated is None else evaluated,
            NAN if allocated is None else allocated,
            NAN if reserved is None else reserved,
            -1 if tokens is None else self._count("tokens", tokens),
            flags | more,
            *seconds,
            nested,
        )
        recorder.step(values, now)
        if allocated:
            self._report_peak()
        if (failed := phases.failed) is not None:
            phases.failed = None
            self._report("phase", failed)

    def _report_peak(self) -> None:
        """Log the GPU's memory if its peak has grown (source 003's `print_memory_stats`)."""
        phases = self.phases
        if phases.count < _PEAK_FROM_STEP or phases.started < self._peak_at:
            return
        peak = self._memory.new_peak()
        if peak is None:
            return
        self._peak_at = phases.started + _PEAK_EVERY_S
        allocated, reserved, highest = gb(peak.allocated), gb(peak.reserved), gb(peak.peak)
        self._recorder.emit(
            event(
                "gpu_usage",
                "info",
                f"GPU MEMORY: Allocated: {or_unknown(allocated, '.2f')} GB | Reserved: "
                f"{or_unknown(reserved, '.2f')} GB | Peak: {or_unknown(highest, '.2f')} GB",
                rank=self._rank,
                allocated_gb=allocated,
                reserved_gb=reserved,
                peak_gb=highest,
            )
        )

    def _read_loss(self, loss: Any, norm: float | None) -> tuple[float | None, int]:
        """The loss as a number, and its flags."""
        device, flags = None, layout.FLAG_LOSS_GIVEN
        if type(loss) is Loss:
            if loss.steps_ago:
                flags |= min(loss.steps_ago, layout.MAX_LOSS_LAG) << layout.LOSS_LAG_SHIFT
            if loss.summed:
                flags |= layout.FLAG_LOSS_SUMMED
            loss = loss.value
        elif type(loss) is not float:
            unread: tuple[float | None, str | None] = (None, None)
            loss, device = self._attempt("loss", lambda: number("loss", loss), unread)
            if loss is None:
                return None, 0
        if loss == 0.0 and norm is not None and not math.isfinite(norm):
            # Hugging Face's Trainer reports a NaN loss as 0.0; the gate must not treat that as a
            # real loss.
            loss = NAN
        self.losses.append(loss)
        if device == "cpu" and (self._cuda_expected or cuda_in_use()):
            flags |= layout.FLAG_LOSS_ON_CPU
        return loss, flags

    def _count(self, name: str, value: Any) -> int:
        """Return `value` as an int that fits a record; -1 if it cannot be read."""
        if type(value) is int and -MAX_INT <= value < MAX_INT:
            return value
        number = self.whole(name, value)
        return -1 if number is None else number

    def as_float(self, name: str, value: Any) -> float | None:
        """Return `value` as a float, possibly NaN; None if it is None or cannot be read. A value
        that cannot be read is reported."""
        if value is None or type(value) is float:
            return value
        return self._attempt(name, lambda: number(name, value)[0], None)

    def whole(self, name: str, value: Any) -> int | None:
        """Return `value` as an int that fits a record; None if it is None or cannot be read. A
        value that cannot be read is reported."""
        if value is None or (type(value) is int and -MAX_INT <= value < MAX_INT):
            return value
        return self._attempt(name, lambda: whole(value), None)

    def _attempt(self, name: str, read: Callable[[], T], fallback: T) -> T:
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - the caller may pass any object, and CUDA may be broken; it is reported
            self._report(name, error)
            return fallback
