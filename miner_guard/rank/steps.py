"""Ends an inner step: builds one record from what the training loop reports and what the hook
measures."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from miner_guard.eventlog.catalog import make_finding
from miner_guard.flight_recorder import layout
from miner_guard.flight_recorder.layout import NAN
from miner_guard.flight_recorder.records import StepRecord
from miner_guard.rank import numbers, standalone_log
from miner_guard.rank.environment import RankContext
from miner_guard.rank.numbers import MAX_INT
from miner_guard.rank.phases import Phase, PhaseNames, Phases
from miner_guard.rank.recorder import Recorder
from miner_guard.record.words import gb

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
        self._lines = standalone_log.StepLines(place.settings.steps) if place.rank == 0 else None
        self._memory = numbers.CudaMemory()
        self._rank = place.rank
        self._peak_at = 0.0
        """Monotonic time from which the next peak may be reported."""

        expect = place.settings.gpu.expect
        self._cuda_expected = isinstance(expect, int) and expect > 0
        self.phases = Phases(recorder.flight, recorder.monotonic)
        self.names = PhaseNames(partial(Phase, self.phases), place.settings.hang.allowances)

    @property
    def count(self) -> int:
        """Number of steps this process has taken."""
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
        self._log_if_alone(record)
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
        self._recorder.emit(
            make_finding(
                "gpu_memory_peak",
                rank=self._rank,
                allocated_gb=gb(peak.allocated),
                reserved_gb=gb(peak.reserved),
                peak_gb=gb(peak.peak),
            )
        )

    def _log_if_alone(self, record: StepRecord) -> None:
        if self._lines is not None and self._recorder.notifier.alone:
            for finding in self._lines.of(record):
                self._recorder.own_log.say(finding)

    def _read(self, record: StepRecord) -> None:
        """Convert the reported values to numbers. A plain number, the usual case, costs no function
        call."""
        if (lr := record.lr) is not None and type(lr) is not float:
            record.lr = self.known("lr", lr)
        if (norm := record.grad_norm) is not None and type(norm) is not float:
            record.grad_norm = self.known("grad_norm", norm)
        if (evaluated := record.eval_loss) is not None and type(evaluated) is not float:
            record.eval_loss = self.known("eval_loss", evaluated)
        if record.loss is not None:
            self._read_loss(record)
        if (outer := record.outer_step) is not None and not (
            type(outer) is int and -MAX_INT <= outer < MAX_INT
        ):
            record.outer_step = self.whole("outer_step", outer)
        if (inner := record.inner_step) is not None and not (
            type(inner) is int and -MAX_INT <= inner < MAX_INT
        ):
            record.inner_step = self.whole("inner_step", inner)
        if (tokens := record.tokens) is not None and not (
            type(tokens) is int and -MAX_INT <= tokens < MAX_INT
        ):
            record.tokens = self.whole("tokens", tokens)
        if not (type(total := record.total_steps) is int and -MAX_INT <= total < MAX_INT):
            record.total_steps = -1 if (read := self.whole("total_steps", total)) is None else read

    def _read_loss(self, record: StepRecord) -> None:
        loss: Any = record.loss
        device: str | None = None
        if isinstance(loss, numbers.Loss):
            lag = min(loss.steps_ago, layout.MAX_LOSS_LAG) << layout.LOSS_LAG_SHIFT
            record.flags |= lag | (layout.FLAG_LOSS_SUMMED if loss.summed else 0)
            record.loss = loss = loss.value
        elif type(loss) is not float:
            unread: tuple[float | None, str | None] = (None, None)
            loss, device = self._attempt(
                "loss", lambda: numbers.number("loss", record.loss), unread
            )
            record.loss = loss
        if loss is None:
            return
        norm = record.grad_norm
        if loss == 0.0 and norm is not None and not math.isfinite(norm):
            # Hugging Face's Trainer reports a NaN loss as 0.0; the gate must not treat that as a
            # real loss.
            loss = NAN
        self.losses.append(loss)
        if device == "cpu" and (self._cuda_expected or numbers.cuda_in_use()):
            record.flags |= layout.FLAG_LOSS_ON_CPU

    def known(self, name: str, given: Any) -> float | None:
        """Return `given` as a float, possibly NaN; None if it is None or cannot be read. A value
        that cannot be read is reported."""
        if given is None or type(given) is float:
            return given
        return self._attempt(name, lambda: numbers.number(name, given)[0], None)

    def whole(self, name: str, given: Any) -> int | None:
        """Return `given` as an int that fits a record; None if it is None or cannot be read. A
        value that cannot be read is reported."""
        if given is None:
            return None
        return self._attempt(name, lambda: numbers.whole(given), None)

    def _attempt(self, name: str, read: Callable[[], T], fallback: T) -> T:
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - the caller may pass any object, and CUDA may be broken; it is reported
            self._report(name, error)
            return fallback
