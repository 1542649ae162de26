"""Ends an inner step: builds one record from what the training loop reports and what the hook
measures, without waiting for the GPU. Never imports torch.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from miner_guard.rank import layout
from miner_guard.rank.environment import RankContext
from miner_guard.rank.harmless import loaded_module
from miner_guard.rank.layout import NAN, StepRecord
from miner_guard.rank.phases import PhaseNames, Phases
from miner_guard.rank.recorder import Recorder
from miner_guard.record.events import event
from miner_guard.record.words import gb, or_unknown

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
        cuda = loaded_module("torch.cuda")
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

_FLAGS = {
    **dict.fromkeys(("inference", "val_loss", "example_loss", "monitor"), layout.FLAG_EVAL),
    **dict.fromkeys(("upload", "allreduce", "load_state", "pause"), layout.FLAG_SYNC),
}
"""Maps each phase to the flag for a step that spent time in it."""

Report = Callable[[str, BaseException], None]


class Stepper:
    """Records each step. It calls `report` for each value that it cannot read, and records the
    others."""

    def __init__(self, place: RankContext, recorder: Recorder, report: Report) -> None:
        self.record = StepRecord()
        """The record, reused for each step: the hook fills in the reported values, and `end` the
        measurements."""

        self.losses: deque[float] = deque(maxlen=_RECENT_LOSSES)
        self._recorder = recorder
        self._report = report
        self._memory = CudaMemory()
        self._rank = place.rank
        self._peak_at = 0.0
        """Monotonic time from which the next peak may be reported."""

        expect = place.settings.gpu.expect
        self._cuda_expected = isinstance(expect, int) and expect > 0
        self.phases = Phases(recorder.flight, recorder.monotonic)
        self.names = PhaseNames(self.phases, place.settings.hang.allowances)

    @property
    def count(self) -> int:
        return self.phases.count

    def end(self) -> None:
        """End the step now and record it. `record` holds the reported values, which may be of any
        type."""
        record, phases = self.record, self.phases
        now = self._recorder.monotonic()
        record.flags = 0 if phases.count else layout.FLAG_FIRST
        self._read(record)
        phases.adopt_thread()
        record.phases, record.nested_in_monitor_s = phases.take(now)
        for name, seconds in record.phases.items():
            if seconds:
                record.flags |= _FLAGS.get(name, 0)
        phases.count += 1
        record.start, record.end, record.wall = phases.started, now, time.time()
        phases.started = now
        try:
            record.allocated_bytes, record.reserved_bytes = self._memory.read()
        except Exception as error:  # noqa: BLE001 - CUDA may be broken; it is reported
            record.allocated_bytes = record.reserved_bytes = None
            self._report("cuda_memory", error)
        self._recorder.step(record)
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

    def _read(self, record: StepRecord) -> None:
        """Convert the reported values to numbers."""
        record.lr = self.as_float("lr", record.lr)
        record.grad_norm = self.as_float("grad_norm", record.grad_norm)
        record.eval_loss = self.as_float("eval_loss", record.eval_loss)
        if record.loss is not None:
            self._read_loss(record)
        record.outer_step = self.whole("outer_step", record.outer_step)
        record.inner_step = self.whole("inner_step", record.inner_step)
        record.tokens = self.whole("tokens", record.tokens)
        total = self.whole("total_steps", record.total_steps)
        record.total_steps = -1 if total is None else total

    def _read_loss(self, record: StepRecord) -> None:
        loss: Any = record.loss
        device: str | None = None
        if isinstance(loss, Loss):
            lag = min(loss.steps_ago, layout.MAX_LOSS_LAG) << layout.LOSS_LAG_SHIFT
            record.flags |= lag | (layout.FLAG_LOSS_SUMMED if loss.summed else 0)
            record.loss = loss = loss.value
        elif type(loss) is not float:
            unread: tuple[float | None, str | None] = (None, None)
            loss, device = self._attempt("loss", lambda: number("loss", record.loss), unread)
            record.loss = loss
        if loss is None:
            return
        norm = record.grad_norm
        if loss == 0.0 and norm is not None and not math.isfinite(norm):
            # Hugging Face's Trainer reports a NaN loss as 0.0; the gate must not treat that as a
            # real loss.
            loss = NAN
        self.losses.append(loss)
        if device == "cpu" and (self._cuda_expected or cuda_in_use()):
            record.flags |= layout.FLAG_LOSS_ON_CPU

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
