"""Only pid and start time together identify a process, and a signal reaches only that process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from miner_guard.keeper.teardown import Teardown
from miner_guard.system import processes
from miner_guard.system.clock import FakeClock
from miner_guard.system.processes import Process, Stat, descendants


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


@pytest.fixture(params=[True, False], ids=["pidfd", "no pidfd"])
def pidfd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.delattr(os, "pidfd_open")
    return bool(request.param)


@pytest.mark.usefixtures("pidfd")
def test_a_reused_pid_is_not_signalled(child: subprocess.Popen[bytes]) -> None:
    seen = processes.stat(child.pid)
    assert seen is not None
    assert not processes.send(Process(child.pid, seen.process.start - 1), signal.SIGKILL)
    assert child.poll() is None
    assert processes.send(seen.process, signal.SIGKILL)
    assert child.wait(10) == -signal.SIGKILL
    assert not processes.send(seen.process, signal.SIGKILL)


def test_descendants_are_found_through_zombies_and_loops_end() -> None:
    def row(pid: int, parent: int, state: str = "S") -> Stat:
        return Stat(Process(pid, 1), "x", state, parent)

    table = {
        s.process.pid: s
        for s in (row(2, 1), row(3, 2, "Z"), row(4, 3), row(5, 1), row(6, 7), row(7, 6))
    }
    assert {p.pid for p in descendants([2], table)} == {2, 4}
    assert {p.pid for p in descendants([6], table)} == {6, 7}


def test_a_process_that_proc_hides_counts_as_alive(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under hidepid, /proc does not show processes of other users."""
    seen = processes.stat(child.pid)
    assert seen is not None
    monkeypatch.setattr(processes, "stat", lambda _pid: None)
    assert processes.alive(seen.process)
    child.kill()
    child.wait()
    assert not processes.alive(seen.process)


def test_one_call_sends_several_signals(child: subprocess.Popen[bytes]) -> None:
    """A stopped process acts on SIGTERM only when it continues."""
    seen = processes.stat(child.pid)
    assert seen is not None
    assert processes.send(seen.process, signal.SIGSTOP)
    assert processes.send(seen.process, signal.SIGTERM, signal.SIGCONT)
    assert child.wait(10) == -signal.SIGTERM


def test_the_pause_of_a_teardown_does_not_grow_with_the_machines_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stop once waited four times as long as its search took: 46 s for 3,000 processes, 33 of
    them asleep."""
    living = {Process(2**22 + n, 1) for n in range(3000)}
    commands: list[int] = []
    monkeypatch.setattr(processes, "send", lambda *_arguments: True)
    monkeypatch.setattr(processes, "command", lambda pid: commands.append(pid) or "")
    clock = FakeClock()
    fake_time = SimpleNamespace(monotonic=clock.monotonic, thread_time=time.thread_time)
    monkeypatch.setattr("miner_guard.keeper.teardown.time", fake_time)
    teardown = Teardown(lambda: set(living), Process(2**22 - 1, 1))
    teardown.ask(1.0)
    began = clock.monotonic()
    while (again := teardown.step()) is not None:
        assert again <= 1.0
        clock.advance(again)
        if teardown._stage == "kill":
            living.clear()
    assert clock.monotonic() - began < 1.0 + 2.0 + 3 * 0.5
    assert len(teardown.killed) == 3000
    assert len(commands) <= 51, "the others are only counted"
