"""The end of an inner step: what the training loop says of it, what was measured, and one record of both."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from miner_guard.flight_recorder import layout
from miner_guard.flight_recorder.layout import NAN
from miner_guard.rank import alone, numbers
from miner_guard.rank.environment import Place
from miner_guard.rank.phases import Phases
from miner_guard.rank.recorder import Recorder

T = TypeVar("T")

_RECENT_LOSSES = 64
_EVALUATION = tuple(layout.PHASES.index(p) for p in ("inference", "val_loss", "example_loss", "monitor"))
_SYNCHRONISING = tuple(layout.PHASES.index(p) for p in ("upload", "allreduce", "load_state", "pause"))
_SCHEDULED = tuple(layout.PHASES.index(p) for p in layout.SPECIAL_PHASES)

Report = Callable[[str, BaseException], None]


class Stepper:
    """Makes a record of each step. `report` hears of what could not be read; the rest is recorded all the same."""

    def __init__(self, place: Place, recorder: Recorder, phases: Phases, report: Report) -> None:
        self._recorder = recorder
        self._phases = phases
        self._report = report
        self._rank = place.rank
        self._lines = alone.StepLines(place.settings.steps)
        self._memory = numbers.CudaMemory()
        self._started = recorder.monotonic()
        expect = place.settings.gpu.expect
        self._cuda_expected = isinstance(expect, int) and expect > 0
        self.losses: deque[float] = deque(maxlen=_RECENT_LOSSES)
        self.count = 0
        """Steps of this process."""

    def step(
        self, outer_step: Any, inner_step: Any, loss: Any, lr: Any, grad_norm: Any, tokens: Any, total_steps: Any,
        eval_loss: Any,
    ) -> None:  # fmt: skip
        """Record a step that ends now."""
        now = self._recorder.monotonic()
        given, loss_value, flags = self._loss(loss)
        lr_value = self.number("lr", lr)
        norm_value, norm_given = self._optional("grad_norm", grad_norm, layout.FLAG_GRAD_NORM_GIVEN)
        eval_value, eval_given = self._optional("eval_loss", eval_loss, layout.FLAG_EVAL_LOSS_GIVEN)
        flags |= norm_given | eval_given
        if loss_value == 0.0 and norm_given and not math.isfinite(norm_value):
            # HF Trainer shows a NaN loss as 0.0: the gate must not take it for a number.
            self.losses[-1] = NAN
        outer, inner = self.whole("outer_step", outer_step), self.whole("inner_step", inner_step)
        self._adopt_thread()
        seconds, nested = self._phases.take(now)
        flags |= self._kind(seconds)
        self.count += 1
        total = self.count if total_steps is None else self.whole("total_steps", total_steps)
        memory = self._attempt("cuda_memory", self._memory.read, (NAN, NAN))
        self._recorder.step(
            outer, inner, total, self._started, now, loss_value, lr_value, norm_value, eval_value,
            memory, self.whole("tokens", tokens), flags, seconds, nested, *self._phases.shown(now),
        )  # fmt: skip
        if self._recorder.bell.alone and self._rank == 0:
            said, evaluated = loss_value if given else None, eval_value if eval_given else None
            length = now - self._started
            # What the supervisor's rule leaves out as well: compilation, and what a step holds beside training.
            training = 0.0 if flags & layout.FLAG_FIRST else length - sum(seconds[column] for column in _SCHEDULED)
            lines = self._lines.of(now, length, training, outer, inner, said, lr_value, memory[0], evaluated)
            for finding in lines:
                self._recorder.own_log.say(finding)
        if (failed := self._phases.failed) is not None:
            self._phases.failed = None
            self._report("phase", failed)
        self._started = now

    def _kind(self, seconds: list[float]) -> int:
        flags = layout.FLAG_FIRST if self.count == 0 else 0
        for column in _EVALUATION:
            if seconds[column]:
                flags |= layout.FLAG_EVAL
        for column in _SYNCHRONISING:
            if seconds[column]:
                flags |= layout.FLAG_SYNC
        return flags

    def _loss(self, loss: Any) -> tuple[bool, float, int]:
        if loss is None:
            return False, NAN, 0
        if isinstance(loss, numbers.Loss):
            self.losses.append(loss.value)
            summed = layout.FLAG_LOSS_SUMMED if loss.summed else 0
            lag = min(loss.steps_ago, layout.MAX_LOSS_LAG) << layout.LOSS_LAG_SHIFT
            return True, loss.value, layout.FLAG_LOSS_GIVEN | summed | lag
        unread: tuple[float | None, str | None] = (None, None)
        value, device = self._attempt("loss", lambda: numbers.number("loss", loss), unread)
        if value is None:
            return False, NAN, 0
        self.losses.append(value)
        on_cpu = device == "cpu" and (self._cuda_expected or numbers.cuda_in_use())
        return True, value, layout.FLAG_LOSS_GIVEN | (layout.FLAG_LOSS_ON_CPU if on_cpu else 0)

    def _optional(self, name: str, given: Any, flag: int) -> tuple[float, int]:
        """A number of which NaN is a value too, and `flag` where it could be read."""
        value = self.known(name, given)
        return (NAN, 0) if value is None else (value, flag)

    def number(self, name: str, given: Any) -> float:
        """`given` as a float, NaN where it is unknown or must not be read here."""
        value = self.known(name, given)
        return NAN if value is None else value

    def known(self, name: str, given: Any) -> float | None:
        """`given` as a float, of which NaN is one too; None where it is unknown or must not be read here."""
        if given is None or type(given) is float:
            return given
        return self._attempt(name, lambda: numbers.number(name, given)[0], None)

    def whole(self, name: str, value: Any) -> int:
        """`value` as an int, -1 where it is unknown or no number."""
        if type(value) is int and abs(value) < numbers.LARGEST:
            return value
        return -1 if value is None else self._attempt(name, lambda: numbers.whole(value), -1)

    def base(self, outer_step: Any) -> int | None:
        """The outer step that the state was loaded from; None where it is unknown or no number."""
        base = self.whole("base_outer_step", outer_step)
        return None if base < 0 else base

    def _attempt(self, name: str, read: Callable[[], T], fallback: T) -> T:
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - any object may be handed in, and CUDA may be broken; it is reported
            self._report(name, error)
            return fallback

    def _adopt_thread(self) -> None:
        # The thread that steps is the one that trains, wherever the guard was made.
        if not self._phases.stack:
            self._phases.owner = threading.get_ident()
