"""A helper process that a monitor keeps running alongside the guard. It works from files that the
guard has written, so its failures affect neither the guard nor the miner.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from miner_guard.record.events import degraded
from miner_guard.system import helpers
from miner_guard.system.children import Backoff, own_module
from miner_guard.system.readiness import ready
from miner_guard.watch.base import Context

_START_S = 20.0
_KILL_S = 1.0
"""Time to wait after SIGKILL; a process stuck in the kernel is left behind."""

_MAX_LINE = 64 * 1024


@dataclass(frozen=True)
class HelperSpec:
    """The program to run, and the wording for its failures."""

    job: str
    """Name of the job that starts it."""

    module: str
    order: Mapping[str, Any]
    """Its settings, sent as one line of JSON on its stdin; never on its command line, since they
    may hold secrets."""

    env: Mapping[str, str]
    failure: str
    """What to report as unavailable while it is not running, such as `no HTTP port`."""

    refusal: str = "its process exited before it answered"
    """The likely reason if it exits without an answer."""


class HelperProcess:
    """Starts the process in a job, and restarts it with growing backoff when it exits.

    With `on_answer`, the process acknowledges its settings with one line on stdout, which
    `on_answer` receives; otherwise it counts as running once it has been started.
    """

    def __init__(
        self, context: Context, spec: HelperSpec, on_answer: Callable[[str], None] | None = None
    ) -> None:
        self._context, self._spec, self._on_answer = context, spec, on_answer
        self.reason: str | None = None
        """Why it is not running; None while it is running or has not failed yet."""

        self.child: subprocess.Popen[bytes] | None = None
        self.running = False
        """True once it is running and, if an answer is expected, has answered."""

        self._again_at: float | None = None
        self._started_at = context.clock.monotonic()
        self._backoff = Backoff()
        self._stopping = False
        self._rest = b""

    def start(self) -> None:
        """Start it in a job, which waits for its answer."""
        self._context.jobs.once(self._spec.job, self._open)

    def tick(self, now: float) -> list[str]:
        """Restart it if it has exited and its backoff is over. Returns the lines that it has
        written since its answer."""
        lines = self._lines() if self.running else []
        if self.running and self.child is not None and self.child.poll() is not None:
            self._close()
            self._failed("its process exited")
        if self._again_at is not None and now >= self._again_at:
            self._again_at = None
            self.start()
        return lines

    def stop(self) -> None:
        """Kill it."""
        self._stopping = True
        if self.running:
            self._close()
        elif self.child is not None:
            # Leave the pipe open: the job that waits for the answer still needs it, and closes it.
            self.child.kill()

    def let_finish(self) -> None:
        """Close its stdin. It then finishes its work and exits, possibly after the guard."""
        self._stopping = True
        if self.child is not None:
            _let_finish(self.child)

    def _open(self) -> None:
        spec = self._spec
        child = subprocess.Popen(
            own_module(spec.module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # A line that follows the answer must stay in the pipe, where `_lines` finds it.
            bufsize=0,
            env=dict(spec.env),
            start_new_session=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(dict(spec.order)).encode() + b"\n")
        self.child = child
        if self._on_answer is None:
            if self._stopping:
                _let_finish(child)
            self._is_running(child)
            return
        readable, _ = ready([child.stdout], _START_S)
        answer = child.stdout.readline(_MAX_LINE).strip().decode() if readable else ""
        if self._stopping:
            self._close()
        elif answer:
            self._on_answer(answer)
            self._is_running(child)
        else:
            self._close()
            self._failed(spec.refusal)

    def _is_running(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        self._rest, self.reason = b"", None
        self._started_at = self._context.clock.monotonic()
        self.running = True

    def _lines(self) -> list[str]:
        assert self.child is not None
        assert self.child.stdout is not None
        piece = b""
        with contextlib.suppress(BlockingIOError):
            piece = os.read(self.child.stdout.fileno(), _MAX_LINE)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line.decode(errors="replace") for line in lines if line]

    def _failed(self, reason: str) -> None:
        now = self._context.clock.monotonic()
        lived_s = now - self._started_at if self.running else 0.0
        self._again_at = now + self._backoff.ended(lived_s)
        if self._backoff.first:
            what = f"{self._spec.failure}: {reason}; retrying with backoff"
            self._context.emit(degraded(what))
        self.running, self.reason = False, reason

    def _close(self) -> None:
        child, self.child = self.child, None
        if child is None:
            return
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_KILL_S)


def _let_finish(child: subprocess.Popen[bytes]) -> None:
    helpers.let_outlive(child.pid)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()
