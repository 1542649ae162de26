"""Logs a rank's events when no supervisor does: console lines and, if there is a state directory,
JSON lines.

A separate thread writes them, so that a full pipe or a slow disk never stalls a step. Events that
overflow its queue are counted, and the count is reported.
"""

from __future__ import annotations

import atexit
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from miner_guard.config import LogSettings, StepSettings
from miner_guard.eventlog import catalog
from miner_guard.eventlog.rendering import console_line, json_line, rotate
from miner_guard.rank.layout import FLAG_FIRST, StepRecord
from miner_guard.record.events import Event, degraded, event
from miner_guard.record.phases import SPECIAL_PHASES
from miner_guard.record.redaction import Redactor
from miner_guard.record.words import counted, gb
from miner_guard.state_dir import StateDir, json_number, make_folder, open_private
from miner_guard.system.clock import iso_utc
from miner_guard.system.once import OncePer

_MAX_QUEUE = 1000
_MAX_LOG = LogSettings.max_bytes
_KEPT_LOGS = LogSettings.keep
_STEP_LINES_PER_S = LogSettings.step_lines_per_s
_LEFT_OUT_EVERY_S = 60.0
_LAST_WORDS_S = 1.0
"""How long an exiting process waits for its last lines to be written."""


class StandaloneLog:
    def __init__(self, rank: int, run_id: str, state: StateDir | None, console: int | None) -> None:
        """`console`: the descriptor to print on, or None."""
        self._rank = rank
        self._run_id = run_id
        self._state = state
        self._host = socket.gethostname()
        self._redactor = Redactor.from_environment(os.environ)
        # Reentrant, because a signal handler of the miner may log in the middle of a step.
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._queued = self._written = 0
        self._thread: threading.Thread | None = None
        self.left_out = 0
        """Number of events that overflowed the queue or could not be written."""

        self._why = "too many lines at once"
        self._left_out_reported = 0
        self._report_again = -math.inf

        self._console = console

    def say(self, event: Event) -> None:
        """Queue one event. Never waits, never raises."""
        if self._queued - self._written >= _MAX_QUEUE:
            self.left_out += 1
            return
        self._queued += 1
        self._queue.put(event)
        if self._thread is None:
            self._begin()

    def _begin(self) -> None:
        thread = threading.Thread(target=self._write_on, name="miner-guard-log", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # This host allows no more threads, or the interpreter is exiting. This event stays
            # queued, and the next one tries again to start the thread.
            return
        self._thread = thread
        atexit.register(self.flush)

    def flush(self, timeout_s: float = _LAST_WORDS_S) -> None:
        """Wait up to `timeout_s` for all queued events to be written."""
        end = time.monotonic() + timeout_s
        while self._thread is not None and self._written < self._queued and time.monotonic() < end:
            time.sleep(0.005)

    def detach_after_fork(self) -> None:
        """Call this in a forked child, which lacks the writer thread: from now on, events are
        discarded, and `flush` does not wait."""
        self._console = self._state = self._thread = None
        atexit.unregister(self.flush)

    def _write_on(self) -> None:
        while True:
            self._try(self._queue.get())
            self._say_left_out()
            self._written += 1

    def _try(self, event: Event) -> None:
        try:
            self._write(event)
        except Exception as error:  # noqa: BLE001 - one failure must not silence the other events; it is counted and reported
            self.left_out += 1
            self._why = f"{event.name}: {type(error).__name__}: {error}"[:200]

    def _say_left_out(self) -> None:
        now = time.monotonic()
        count = self.left_out - self._left_out_reported
        if count <= 0 or now < self._report_again:
            return
        self._left_out_reported, self._report_again = self.left_out, now + _LEFT_OUT_EVERY_S
        lines = counted(count, "line")
        what = f"{lines} from this rank could not be logged; last error: {self._why}"
        self._try(degraded(what))

    def _write(self, event: Event) -> None:
        record = self._redactor.value(self._record(event))
        if self._state is not None:
            self._append(self._state, json_line(record) + "\n")
        if self._console is not None:
            try:
                os.write(
                    self._console,
                    (console_line(record, emoji=True) + "\n").encode("utf-8", "replace"),
                )
            except BlockingIOError:
                # The program has made the pipe non-blocking, and it is full. Later lines may fit.
                self.left_out += 1
                self._why = "the console's pipe is full"
            except OSError:
                # Nobody reads the console anymore, and there is nowhere else to report that.
                self._console = None

    def _record(self, event: Event) -> Mapping[str, Any]:
        return {
            "ts": iso_utc(time.time()),
            "level": event.level,
            "event": event.name,
            "msg": event.text,
            "run_id": self._run_id,
            "host": self._host,
            "rank": self._rank if event.rank is None else event.rank,
            **event.fields,
        }

    def _append(self, state: StateDir, line: str) -> None:
        try:
            make_folder(state.root)
            fd = open_private(state.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        except OSError as error:
            self._lost(error)
            return
        try:
            os.write(fd, line.encode("utf-8", "replace"))
            # Every rank reopens the file for each line, so rank 0 can rotate it safely.
            if self._rank == 0 and os.fstat(fd).st_size > _MAX_LOG:
                rotate(state.log, _KEPT_LOGS)
        except OSError as error:
            self._lost(error)
        finally:
            os.close(fd)

    def _lost(self, error: OSError) -> None:
        self.left_out += 1
        self._why = f"guard.jsonl: {error.strerror or error}"


class StepLines:
    """The events that rank 0 logs about its steps without a supervisor: the step line, a slow
    step by the absolute rule, and a NaN or infinite loss."""

    def __init__(self, settings: StepSettings) -> None:
        self._settings = settings
        self._lines = OncePer(1 / _STEP_LINES_PER_S)

    def of(self, step: StepRecord) -> Iterator[Event]:
        """Yield the events of one step, with at most five step lines per second."""
        if self._lines.ask(step.end):
            yield catalog.make_finding(
                "inner_step",
                rank=0,
                outer_step=step.outer_step,
                inner_step=step.inner_step,
                lr=step.lr,
                loss=json_number(step.loss),
                step_time_s=step.seconds,
                gpu_mem_gb=gb(step.allocated_bytes),
                eval_loss=json_number(step.eval_loss),
                left_out=self._lines.take_left_out(),
            )
        if _training_seconds(step) > self._settings.slow_s:
            yield catalog.make_finding(
                "slow_step",
                rank=0,
                step_time_s=step.seconds,
                expected=self._settings.expected,
                inner_step=step.inner_step,
                limit_s=self._settings.slow_s,
                rule="absolute",
            )
        if step.loss is not None and not math.isfinite(step.loss):
            yield catalog.make_finding(
                "loss_nan", rank=0, step=step.inner_step, loss=str(step.loss)
            )
        elif step.eval_loss is not None and not math.isfinite(step.eval_loss):
            yield event(
                "eval_loss_nan",
                "warning",
                f"EVALUATION LOSS is {step.eval_loss!s} at step {step.inner_step}",
                rank=0,
                step=step.inner_step,
                eval_loss=str(step.eval_loss),
            )


def _training_seconds(step: StepRecord) -> float:
    """Return the seconds that the absolute slow-step rule compares with its limit. As in the
    supervisor, they exclude work other than training, and are 0 for the first step, which
    compiles."""
    if step.flags & FLAG_FIRST:
        return 0.0
    return step.seconds - sum(step.phases.get(name, 0.0) for name in SPECIAL_PHASES)
