"""Only pid and start time together identify a process, and a signal reaches only that process."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from miner_guard.guard.orphan_cleanup import PidRegistry, left_behind
from miner_guard.guard.process_tree import ProcessTree
from miner_guard.guard.teardown import Teardown
from miner_guard.state_dir import StateDir
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


class Searches(ProcessTree):
    """Counts its searches of a host without processes."""

    def __init__(self, folder: Path, clock: FakeClock) -> None:
        super().__init__(StateDir(folder), clock)
        self.searches = 0

    def _table(self) -> processes.Table:
        self.searches += 1
        return {}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Searches:
    monkeypatch.setattr(processes, "latest_pid", lambda: 77)
    return Searches(tmp_path, FakeClock())


def _seconds(tree: Searches, count: int) -> int:
    """Number of searches in `count` seconds."""
    before = tree.searches
    for _ in range(count):
        cast(FakeClock, tree._clock).advance(1.01)
        tree.refresh(None)
    return tree.searches - before


def test_an_idle_host_is_searched_seldom(tree: Searches) -> None:
    """Walking over all threads twice a second was most of what an idle guard cost."""
    assert 1 <= _seconds(tree, 30) <= 4


def test_a_new_process_or_an_ended_child_is_found_at_once(
    tree: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    _seconds(tree, 1)
    tree.child_ended()
    assert _seconds(tree, 1) == 1
    monkeypatch.setattr(processes, "latest_pid", lambda: 78)
    assert _seconds(tree, 1) == 1
    assert _seconds(tree, 5) == 0


def test_a_failed_search_is_repeated(tree: Searches, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_tree: Searches) -> processes.Table:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Searches, "_table", refuse)
        with pytest.raises(OSError, match="Too many"):
            _seconds(tree, 1)
    assert _seconds(tree, 1) == 1


def test_the_latest_pid_changes_with_every_process() -> None:
    before = processes.latest_pid()
    subprocess.run(["true"], check=True)
    assert processes.latest_pid() != before


def test_one_call_sends_several_signals(child: subprocess.Popen[bytes]) -> None:
    """A stopped process acts on SIGTERM only when it continues."""
    seen = processes.stat(child.pid)
    assert seen is not None
    assert processes.send(seen.process, signal.SIGSTOP)
    assert processes.send(seen.process, signal.SIGTERM, signal.SIGCONT)
    assert child.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize("count", [60, 3000])
def test_the_pause_of_a_teardown_does_not_grow_with_the_machines_load(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop once waited four times as long as its search took: 46 s for 3,000 processes, 33 of
    them asleep."""
    living = {Process(2**22 + n, 1) for n in range(count)}
    commands: list[int] = []
    monkeypatch.setattr(processes, "send", lambda *_arguments: True)
    monkeypatch.setattr(processes, "alive", lambda _process: bool(living))
    monkeypatch.setattr(processes, "command", lambda pid: commands.append(pid) or "")
    clock = FakeClock()
    teardown = Teardown(clock, lambda: set(living), Process(2**22 - 1, 1), grace_s=1.0)
    teardown.ask()
    began = clock.monotonic()
    while (again := teardown.step()) is not None:
        assert again <= 1.0
        clock.advance(again)
        if teardown._stage == "kill":
            living.clear()
    assert clock.monotonic() - began < 1.0 + 2.0 + 3 * 0.5
    assert len(teardown.killed) == count
    assert len(commands) <= 51, "the others are only counted"
