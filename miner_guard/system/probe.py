"""Probes: queries that may hang (on a driver, a node, storage, a pickle) each run in a child
process with a deadline.

The child runs a module or a script. It reads one JSON document from stdin and writes one to the
file descriptor whose number is in `_MINER_GUARD_PROBE_FD`. It may print anything: the guard uses
its last output as the reason if it fails.

Probes and all other helpers are children of the guard's process. The guard marks its own
environment (`processes.HELPER`), which every helper inherits: the keeper tells by it which orphans
are the guard's and which are the miner's.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from miner_guard.system.children import memory_file, module_command

_running: set[subprocess.Popen[bytes]] = set()
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


def ask(
    module: str | Path,
    request: Mapping[str, Any],
    deadline_s: float,
    *,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
    patience_s: float = 0.0,
) -> Answer:
    """Run a probe and wait up to `deadline_s` for its answer. Never raises.

    After the deadline it waits up to `patience_s` longer while the child is making progress,
    because `import torch` can take a minute from a cold disk.

    `module` is the name of one of the guard's modules, or the path of a script. A script can run in
    an interpreter (`python`) that lacks this package.
    """
    command = module_command(module, python) if isinstance(module, str) else [python, str(module)]
    name = module if isinstance(module, str) else module.stem
    start = time.monotonic()
    with contextlib.ExitStack() as files:
        try:
            # Memory files: a child can neither block on them nor fill a disk.
            question, answer, printed = (
                files.enter_context(os.fdopen(memory_file(kind), "w+b", buffering=0))
                for kind in ("request", "answer", "output")
            )
            question.write(json.dumps(request).encode())
            question.seek(0)
            child = subprocess.Popen(
                command,
                stdin=question,
                stdout=printed,
                stderr=subprocess.STDOUT,
                pass_fds=(answer.fileno(),),
                env={**(os.environ if env is None else env), PROBE_FD: str(answer.fileno())},
                start_new_session=True,
            )
        except OSError as error:
            return Answer(None, f"probe {name} could not be started: {error.strerror}", 0.0)
        _running.add(child)
        try:
            waited_s = _wait(child, deadline_s, patience_s)
        finally:
            _running.discard(child)
            _end(child)
        seconds = time.monotonic() - start
        text = os.pread(answer.fileno(), _MAX_ANSWER, 0)
        if not text and waited_s is not None:
            return Answer(None, f"no answer within {waited_s:.3g} s", seconds, answered=False)
        if not text:
            size = os.fstat(printed.fileno()).st_size
            words = os.pread(printed.fileno(), _TAIL, max(0, size - _TAIL)).decode(errors="replace")
            last = (words.strip().splitlines() or ["it printed nothing"])[-1]
            return Answer(None, f"probe {name} exited with {child.returncode}: {last}", seconds)
    value, reason = _parsed(text)
    return Answer(value, reason, seconds)


def end_all() -> None:
    """Kill all probes in progress; each caller gets a reason immediately. Call this when the guard
    stops."""
    for child in list(_running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def _wait(child: subprocess.Popen[bytes], deadline_s: float, patience_s: float) -> float | None:
    """Wait until the child ends; the seconds waited if it did not by its deadline, or later if it
    makes progress until then.

    Progress means CPU time used by the child, or bytes that it reads (including page faults on a
    mapped file). A child that is blocked in a driver call shows neither.
    """
    wait_s, waited_s, before = deadline_s, 0.0, None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(wait_s)
            return None
        done, waited_s = _progress(child.pid), waited_s + wait_s
        wait_s = min(_LOOK_S, deadline_s + patience_s - waited_s)
        if wait_s <= 0 or (before is not None and done - before < _MIN_PROGRESS):
            return waited_s
        before = done


def _progress(pid: int) -> float:
    """CPU seconds used plus megabytes read."""
    try:
        process = psutil.Process(pid)
        cpu, io = process.cpu_times(), process.io_counters()
    except (psutil.Error, OSError):
        return 0.0
    return float(cpu.user + cpu.system + (io.read_bytes + io.read_chars) / 1e6)


def _parsed(text: bytes) -> tuple[Any, str | None]:
    """The value in an answer and the reason why there is none."""
    if len(text) == _MAX_ANSWER:
        return None, "the answer is too large"
    try:
        document = json.loads(text)
    except ValueError:
        return None, "the answer is not JSON"
    if "error" in document:
        return None, str(document["error"])
    return document.get("value"), None


def _end(child: subprocess.Popen[bytes]) -> None:
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


class HelperCpu:
    """Measures the CPU seconds of all helpers, ended and running, since this object was created.
    Use from one thread only."""

    def __init__(self) -> None:
        self._start_s = _reaped_s()
        self._total_s = 0.0

    def read(self) -> float:
        """Return the total, which never decreases."""
        # Read the reaped helpers first: one that is reaped in between is then missing from one
        # reading rather than counted twice.
        used_s = _reaped_s() - self._start_s
        for helper in _children():
            with contextlib.suppress(psutil.Error):
                used_s += sum(helper.cpu_times()[:4])
        self._total_s = max(self._total_s, used_s)
        return self._total_s


def end_helpers(within_s: float) -> None:
    """Kill any remaining helpers. Returns when they are gone, or after `within_s` seconds.

    Each monitor, probe and sender ends its own helper. But a thread may start one just after the
    helper's owner has stopped, and nothing else would end that helper.
    """
    deadline = time.monotonic() + within_s
    while (living := list(_children())) and time.monotonic() < deadline:
        for helper in living:
            with contextlib.suppress(psutil.Error):
                helper.kill()
        time.sleep(0.01)


def _reaped_s() -> float:
    """CPU seconds of the children that this process has reaped."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _children() -> Iterator[psutil.Process]:
    """The children that any thread of this process started and that have not ended."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE:
                yield child
