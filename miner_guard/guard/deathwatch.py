"""Runs a small process (`last_resort`) that stops the miner if the guard is killed.

That process waits for EOF on a pipe that only the guard holds open. It reads the run's process list
from memory that the guard keeps up to date, so that it finds every process even if the disk is dead
or a process has cleared its environment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import miner_guard
from miner_guard.guard.last_resort import RunToEnd
from miner_guard.guard.loop import Loop
from miner_guard.record.events import Event, degraded
from miner_guard.system.children import Backoff, signal_at_parents_death
from miner_guard.system.processes import HELPER, Process

_PACKAGES = Path(miner_guard.__file__).resolve().parents[1]

_BOOT = """import json, sys
order = json.loads(sys.stdin.readline())
sys.path.insert(0, order.pop("packages"))
from miner_guard.guard.loop import Loop
from miner_guard.guard.last_resort import main
main(order)"""
"""The process runs this program, which reads its settings from stdin. The command line contains
neither the guard's name nor its folder, so that `pkill -f miner-guard` does not match it."""


class Deathwatch:
    """Starts the `last_resort` process and restarts it when something kills it. Supervisor thread
    only."""

    def __init__(
        self,
        run: RunToEnd,
        env: Mapping[str, str],
        loop: Loop,
        *,
        report: Callable[[Event], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._env, self._loop, self._report, self._monotonic = env, loop, report, monotonic
        self._list = os.memfd_create("miner-guard-run", os.MFD_CLOEXEC)
        self._run = replace(run, list_fd=self._list)
        self._process: subprocess.Popen[bytes] | None = None
        self._backoff = Backoff()
        self._start_at = self._started_at = 0.0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process. Main thread only: the kernel sends the parent-death signal when the
        thread that forked ends. Raises OSError."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        order = {**asdict(self._run), "packages": str(_PACKAGES)}
        try:
            # Write this before the fork, because the guard may be killed immediately after it. The
            # pipe holds far more than these few hundred bytes.
            os.write(writing, json.dumps(order).encode() + b"\n")
            # Run the real interpreter, not a virtual environment's symlink: the path of the symlink
            # may contain the guard's name.
            self._process = subprocess.Popen(
                [os.path.realpath(sys.executable), "-I", "-S", "-c", _BOOT],
                stdin=reading,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                pass_fds=(self._list,),
                # A suspended process would not notice that the guard is gone. Arrange the signal
                # before exec, because the process may be suspended before its first line runs.
                preexec_fn=lambda: signal_at_parents_death(signal.SIGCONT),
                env={"PATH": self._env.get("PATH", os.defpath), HELPER: "reaper"},
            )
        except OSError:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        self._writing = writing
        self._started_at = self._monotonic()
        assert self._process.stdout is not None
        self._loop.watch(self._process.stdout.fileno(), self._ended)

    def listed(self, run: Iterable[Process]) -> None:
        """Update the list of the run's processes in shared memory."""
        lines = b"".join(b"%d %d\n" % (process.pid, process.start) for process in run)
        # Overwrite, then truncate, so that the list is (nearly) complete at whatever moment the
        # guard is killed.
        os.pwrite(self._list, lines, 0)
        os.ftruncate(self._list, len(lines))

    def tick(self) -> None:
        """Start the process if a start is due. Call this about once a second."""
        if self._process is None and self._monotonic() >= self._start_at:
            try:
                self.start()
            except OSError as error:
                self._wait_again(0.0, f"can't start ({error.strerror})")

    def _ended(self) -> None:
        """Restart the process after it closed its end of the pipe. The first restart is immediate,
        because the next SIGKILL may be about to hit the guard."""
        assert self._process is not None
        assert self._process.stdout is not None
        self._loop.unwatch(self._process.stdout.fileno())
        self._process.stdout.close()
        os.close(self._writing)
        code = self._process.wait()
        self._process = None
        self._wait_again(self._monotonic() - self._started_at, f"exited (code {code})")
        self.tick()

    def _wait_again(self, lived_s: float, how: str) -> None:
        wait_s = self._backoff.ended(lived_s)
        self._start_at = self._monotonic() + (0.0 if self._backoff.first else wait_s)
        if self._backoff.first:
            what = (
                f"the process that stops the miner if the guard is killed {how}; restarting "
                "it with backoff"
            )
            self._report(degraded(what))

    def dismiss(self) -> None:
        """Stop the process without letting it stop the miner, because the guard is exiting
        cleanly."""
        if self._process is not None:
            assert self._process.stdout is not None
            self._loop.unwatch(self._process.stdout.fileno())
            with contextlib.suppress(OSError):
                os.write(self._writing, b"done\n")
            os.close(self._writing)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=2.0)
        os.close(self._list)
