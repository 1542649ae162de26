"""Forks of one process that has imported what a script needs, for tests that kill it many times."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import IO

_FORKS = """
for _ in sys.stdin:
    if (pid := os.fork()) == 0:
        print(os.getpid(), flush=True)
        work()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    print("ended", os.waitstatus_to_exitcode(status), flush=True)
"""


class Forks:
    """Forks the script again and again; each fork runs the script's function `work`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._asks: IO[str] = process.stdin
        self.prints: IO[str] = process.stdout
        """The current fork's output."""

        self._pid = 0

    def start(self) -> None:
        print(file=self._asks, flush=True)
        self._pid = int(self.prints.readline())

    def kill(self) -> None:
        """End the current fork with SIGKILL, and discard what it printed last."""
        self.signal_kill()
        self.wait()

    def signal_kill(self) -> None:
        """SIGKILL the current fork, from any thread; returns once it is dead. `wait` then reports
        it."""
        gone = os.pidfd_open(self._pid)
        os.kill(self._pid, signal.SIGKILL)
        select.select([gone], [], [])
        os.close(gone)

    def wait(self) -> int:
        """The exit code of the current fork once it has ended, in the form that subprocess uses."""
        while not (line := self.prints.readline()).startswith("ended "):
            assert line, "the process of the forks has died"
        return int(line.split()[1])


@contextlib.contextmanager
def forks(script: str, *arguments: object, env: Mapping[str, str] | None = None) -> Iterator[Forks]:
    """A process that runs `script` (imports os and sys, defines `work`), then forks on demand."""
    command = [sys.executable, "-c", script + _FORKS, *map(str, arguments)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    ) as process:
        yield Forks(process)
        process.communicate()
