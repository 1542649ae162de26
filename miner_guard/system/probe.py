"""Probes: queries that may hang (on a driver, a node, storage, a pickle) each run in a child
process with a deadline.

The child runs a module or a script. It reads one JSON document from stdin and writes one to the
file descriptor whose number is in `_MINER_GUARD_PROBE_FD`. It may print anything: the guard uses
its last output as the reason if it fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from miner_guard.system.children import own_module
from miner_guard.system.readiness import ready

_asked: set[subprocess.Popen[bytes]] = set()
"""Child processes from which the guard is waiting for an answer."""

PROBE_FD = "_MINER_GUARD_PROBE_FD"
_LOOK_S = 2.0
"""Seconds between checks of whether a late child is still making progress."""

_MIN_PROGRESS = 0.1
"""CPU seconds plus megabytes per interval that count as progress. A Python interpreter that is
only waiting stays below this."""

_TAIL = 2000
_MAX_ANSWER = 16 * 1024 * 1024


@dataclass(frozen=True)
class Answer:
    """A probe's result, or the reason why it is unknown."""

    value: Any | None
    reason: str | None
    """None if `value` is the answer."""

    seconds: float
    answered: bool = True
    """False if the deadline passed before the child answered."""

    @property
    def known(self) -> bool:
        return self.reason is None


def ask(
    module: str | Path,
    request: Mapping[str, Any],
    deadline_s: float,
    *,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    patience_s: float = 0.0,
) -> Answer:
    """Run a probe and wait up to `deadline_s` for its answer. Never raises.

    After the deadline it waits up to `patience_s` longer while the child is making progress (see
    `_Deadline`), because `import torch` can take a minute from a cold disk.

    `module` is the name of one of the guard's modules, or the path of a script. A script can run in
    an interpreter (`python`) that lacks this package.
    """
    command = own_module(module, python) if isinstance(module, str) else [python, str(module)]
    name = module if isinstance(module, str) else module.stem
    start = time.monotonic()

    def unknown(reason: str) -> Answer:
        return Answer(None, reason, time.monotonic() - start)

    answer_end, child_end = os.pipe()
    try:
        child = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(child_end,),
            env={**(os.environ if env is None else env), PROBE_FD: str(child_end)},
            start_new_session=True,
        )
    except OSError as error:
        os.close(answer_end)
        os.close(child_end)
        return unknown(f"probe {name} could not be started: {error.strerror}")
    os.close(child_end)
    _asked.add(child)
    try:
        deadline = _Deadline(child.pid, start, deadline_s, patience_s)
        return _talk(_Asked(child, answer_end, name), request, deadline)
    finally:
        _asked.discard(child)
        os.close(answer_end)
        _end(child)


def end_all() -> None:
    """Kill all probes in progress; each caller gets a reason immediately. Call this when the guard
    stops."""
    for child in list(_asked):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


class _Deadline:
    """Decides when to give up on a child: at its deadline, or later if it is still making progress.

    Progress means CPU time used by the child, or bytes that it reads (including page faults on a
    mapped file). A child that is blocked in a driver call shows neither.
    """

    def __init__(self, pid: int, start: float, deadline_s: float, patience_s: float) -> None:
        self.start, self._until = start, start + deadline_s
        self._last = self._until + patience_s
        self._process = psutil.Process(pid)
        self._progress: float | None = None

    def left(self) -> float:
        """Seconds to wait before the next call; 0 or less if it is time to give up."""
        now = time.monotonic()
        if self._until <= now < self._last:
            made = self._made()
            if self._progress is None or made - self._progress >= _MIN_PROGRESS:
                self._progress, self._until = made, min(now + _LOOK_S, self._last)
        return self._until - now

    def missed(self) -> Answer:
        """The answer for a missed deadline."""
        seconds = time.monotonic() - self.start
        reason = f"no answer within {self._until - self.start:.3g} s"
        return Answer(None, reason, seconds, answered=False)

    def _made(self) -> float:
        """The child's progress: CPU seconds used plus megabytes read."""
        try:
            with self._process.oneshot():
                cpu, io = self._process.cpu_times(), self._process.io_counters()
        except (psutil.Error, OSError):
            return 0.0
        return float(cpu.user + cpu.system + (io.read_bytes + io.read_chars) / 1e6)


@dataclass(frozen=True)
class _Asked:
    """A child process that runs a probe."""

    child: subprocess.Popen[bytes]
    answer_end: int
    """The descriptor from which the guard reads the answer."""

    name: str


def _talk(asked: _Asked, request: Mapping[str, Any], deadline: _Deadline) -> Answer:
    child, answer_end = asked.child, asked.answer_end
    assert child.stdin is not None
    assert child.stdout is not None
    pending = json.dumps(request).encode()
    stdin, stdout = child.stdin.fileno(), child.stdout.fileno()
    for fd in (stdin, stdout, answer_end):
        os.set_blocking(fd, False)
    reading, listening, writing = {stdout: b"", answer_end: b""}, [stdout, answer_end], [stdin]
    while True:
        left = deadline.left()
        if left <= 0:
            return deadline.missed()
        readable, writable = ready(listening, left, writing)
        if writable:
            pending = _feed(stdin, pending)
            if not pending:
                child.stdin.close()
                writing = []
        for fd in readable:
            data = os.read(fd, 65536)
            if not data and fd == answer_end:
                # Read again: the child may have printed its last output after `ready` returned.
                words = (reading[stdout] + _rest(stdout))[-_TAIL:]
                seconds = time.monotonic() - deadline.start
                return _parsed(asked, reading[answer_end], words, seconds)
            if not data:
                listening.remove(fd)
                continue
            reading[fd] += data
            if fd == stdout:
                reading[fd] = reading[fd][-_TAIL:]
            elif len(reading[fd]) > _MAX_ANSWER:
                return Answer(None, "the answer is too large", time.monotonic() - deadline.start)


def _rest(fd: int) -> bytes:
    """Read what a non-blocking pipe currently holds; returns its last `_TAIL` bytes."""
    found = b""
    with contextlib.suppress(BlockingIOError):
        while data := os.read(fd, 65536):
            found = (found + data)[-_TAIL:]
    return found


def _feed(stdin: int, pending: bytes) -> bytes:
    try:
        return pending[os.write(stdin, pending) :]
    except BlockingIOError:
        return pending
    except BrokenPipeError:
        return b""


def _parsed(asked: _Asked, text: bytes, printed: bytes, seconds: float) -> Answer:
    if not text:
        words = printed.decode("utf-8", "replace").strip().splitlines()
        try:
            code: int | None = asked.child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            code = None
        last = words[-1] if words else "it printed nothing"
        return Answer(None, f"probe {asked.name} exited with {code}: {last}", seconds)
    try:
        document = json.loads(text)
    except ValueError:
        return Answer(None, "the answer is not JSON", seconds)
    if isinstance(document, dict) and "error" in document:
        return Answer(None, str(document["error"]), seconds)
    return Answer(document.get("value") if isinstance(document, dict) else document, None, seconds)


def _end(child: subprocess.Popen[bytes]) -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # A child in uninterruptible sleep does not die. Do not wait for it; `subprocess` reaps
            # it later.
            child.wait(timeout=0.5)


def request() -> Any:
    """Read the request. Called in the child."""
    return json.load(sys.stdin)


def reply(value: Any = None, error: str | None = None) -> None:
    """Send the answer on the dedicated file descriptor. Called in the child, once."""
    document = {"error": error} if error is not None else {"value": value}
    with os.fdopen(int(os.environ[PROBE_FD]), "w") as file:
        json.dump(document, file, default=str)
