"""Of a process only pid and start time together identify it; signals go to exactly that one."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from miner_guard.state_dir import StateDir
from miner_guard.supervisor.process.pid_registry import PidRegistry, left_behind
from miner_guard.system import processes
from miner_guard.system.processes import Process, Stat, descendants


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


@pytest.fixture(params=[True, False], ids=["pidfd", "no pidfd"])
def pidfd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(processes, "pidfd_works", lambda: request.param)
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


def test_the_list_names_who_lives(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    state = StateDir(tmp_path)
    seen = processes.stat(child.pid)
    assert seen is not None
    written = PidRegistry(state)
    written.write(frozenset({seen.process, Process(2**22 + 1, 1)}))
    assert left_behind(state).processes == {seen.process}
