"""Random sequences of trouble around a guard; after each, a stop ends everything within its grace.

A sequence is its seed: `pytest -m long tests/faults/test_random_trouble.py -k 'seed-17-'` repeats
one. `SEQUENCES` says how many the long run makes (500 by default).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miner_guard.state_dir import StateDir
from miner_guard.supervisor.control.control_socket import NotRunning, ask
from tests.faults.guarded import Guarded, living, until
from tests.faults.test_frozen_disk import Disk

GRACE_S = 2
SEQUENCES = int(os.environ.get("SEQUENCES", "500"))

MINER = """
import os, sys, time
flood = sys.argv[1]
sleeper = os.fork()
if sleeper == 0:
    os.setsid()
    time.sleep(600)
    os._exit(0)
for n in range(10**6):
    print(f'launch {os.getpid()} line {n}', flush=True)
    if os.path.exists(flood):
        os.unlink(flood)
        os.write(1, (b'x' * 100 + b'\\n') * 50_000)
    time.sleep(0.02)
"""


class Trouble:
    """One guard, and what may befall it. Every deed may find that its object is gone."""

    def __init__(self, guarded: Guarded, disk: Disk | None, folder: Path, seed: int) -> None:
        self.guarded, self.disk, self.chance = guarded, disk, random.Random(seed)
        self._flood = folder / "flood"
        self.done: list[str] = []
        self.deeds: list[Callable[[], None]] = [
            self.forward_a_signal,
            self.send_a_needless_signal,
            self.suspend_the_guard,
            self.kill_a_helper,
            self.kill_a_helper,
            self.suspend_a_helper,
            self.kill_the_launcher,
            self.flood,
            self.ask_for_something,
            self.replace_a_file_by_a_pipe,
            self.remove_a_file,
            *([] if disk is None else [self.freeze_for_a_while, self.freeze]),
        ]

    def start(self) -> None:
        settings = {
            "miner.stop_timeout_s": GRACE_S,
            "restart.backoff_s": 0.1,
            "restart.max_restarts": 1000,
            "health.sample_every_s": 1,
        }
        words = [sys.executable, "-c", f"{MINER} # {self.guarded.token}", str(self._flood)]
        self.guarded.start(words, settings=settings)
        until(lambda: b" line 0\n" in self.guarded.output.read_bytes(), 60, self.guarded.tail)

    @property
    def guard(self) -> int:
        return self.guarded.processes[-1].pid

    def _children(self, named: str) -> list[int]:
        found = []
        for pid, words in living(self.guarded.token):
            with contextlib.suppress(OSError):
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.guard and re.search(named, words):
                    found.append(pid)
        return found

    def _helpers(self) -> list[int]:
        return self._children(r"disk\.child|nvml_probe|last-resort|http_server")

    def _signal(self, pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def forward_a_signal(self) -> None:
        self._signal(self.guard, signal.SIGUSR1)

    def send_a_needless_signal(self) -> None:
        for _ in range(self.chance.randrange(1, 200)):
            self._signal(self.guard, signal.SIGCHLD)

    def suspend_the_guard(self) -> None:
        self._signal(self.guard, signal.SIGSTOP)
        time.sleep(self.chance.uniform(0.0, 1.0))
        self._signal(self.guard, signal.SIGCONT)

    def kill_a_helper(self) -> None:
        if helpers := self._helpers():
            self._signal(self.chance.choice(helpers), signal.SIGKILL)

    def suspend_a_helper(self) -> None:
        if helpers := self._helpers():
            self._signal(self.chance.choice(helpers), signal.SIGSTOP)

    def kill_the_launcher(self) -> None:
        for pid in self._children("launch "):
            self._signal(pid, signal.SIGKILL)

    def flood(self) -> None:
        self._flood.touch()

    def ask_for_something(self) -> None:
        what = self.chance.choice(["status", "checkpoint", "restart", "pause", "resume", "?"])
        with contextlib.suppress(NotRunning, OSError, json.JSONDecodeError):
            ask(self.guarded.state, {"do": what}, 3.0)

    def _some_file(self) -> Path:
        state = self.guarded.state
        return self.chance.choice([state.log, state.status, state.roster, state.ledger])

    def replace_a_file_by_a_pipe(self) -> None:
        if self.disk is None or not self.disk.frozen:
            path = self._some_file()
            path.unlink(missing_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path)

    def remove_a_file(self) -> None:
        state = self.guarded.state
        if self.disk is None or not self.disk.frozen:
            for path in (self._some_file(), self.chance.choice([state.socket, state.control])):
                path.unlink(missing_ok=True)

    def freeze(self) -> None:
        if self.disk is not None and not self.disk.frozen:
            self.disk.freeze()

    def freeze_for_a_while(self) -> None:
        if self.disk is not None and not self.disk.frozen:
            self.disk.freeze()
            time.sleep(self.chance.uniform(0.0, 1.0))
            self.disk.thaw()

    def go_on(self) -> None:
        deed = self.chance.choice(self.deeds)
        self.done.append(deed.__name__)
        deed()
        time.sleep(self.chance.uniform(0.0, 0.3))

    def stop(self) -> float:
        """Seconds until the guard has ended; its exit code must be that of a stop."""
        number = self.chance.choice([signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
        asked = time.monotonic()
        try:
            code = self.guarded.stop(number, 60)
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end within 60 s: {self.done}; {_threads(self.guard)}")
        assert code == 0, self.done
        return time.monotonic() - asked

    def assert_output_is_whole(self) -> None:
        """Every line of every launch, none twice, in order."""
        numbers: dict[str, int] = {}
        for match in re.finditer(rb"launch (\d+) line (\d+)\n", self.guarded.output.read_bytes()):
            launch, number = match[1].decode(), int(match[2])
            assert number == numbers.get(launch, -1) + 1, (self.done, match[0])
            numbers[launch] = number


def _threads(pid: int) -> list[str]:
    """Where the kernel holds each thread of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [f"{(task / 'comm').read_text()[:-1]} {(task / 'wchan').read_text()}" for task in tasks]


@pytest.fixture
def disk(tmp_path: Path, guarded: Guarded) -> Iterator[Disk | None]:
    if os.geteuid() != 0:
        yield None
        return
    made = Disk(tmp_path)
    guarded.state = StateDir(made.place / "state")
    yield made
    made.close()


def survive(trouble: Trouble) -> None:
    trouble.start()
    for _ in range(trouble.chance.randrange(3, 9)):
        trouble.go_on()
    took = trouble.stop()
    # Beside the grace: SIGTERM to SIGKILL, the last output, alerts, 2 s for the files. A busy
    # machine takes as long again.
    assert took < 2 * (GRACE_S + 2 + 2 + 2 + 2), (took, trouble.done)
    if trouble.disk is not None:
        trouble.disk.thaw()
    trouble.guarded.assert_nothing_left()
    trouble.assert_output_is_whole()


@pytest.mark.parametrize("seed", [1, 2], ids="seed-{}-".format)
def test_a_stop_is_honoured_after_any_trouble(
    guarded: Guarded, disk: Disk | None, tmp_path: Path, seed: int
) -> None:
    """Guards against the trouble that nobody thought of."""
    survive(Trouble(guarded, disk, tmp_path, seed))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3, 3 + SEQUENCES), ids="seed-{}-".format)
def test_a_stop_is_honoured_after_any_trouble_many_times(
    guarded: Guarded, disk: Disk | None, tmp_path: Path, seed: int
) -> None:
    survive(Trouble(guarded, disk, tmp_path, seed))
