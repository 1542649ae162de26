"""Evidence: kernel states in words, processes that survive SIGKILL, and how much evidence is
kept."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miner_guard.keeper.teardown import TERM_TO_KILL_S, UNKILLABLE_S, Teardown
from miner_guard.state_dir import StateDir
from miner_guard.system import processes
from miner_guard.system.clock import FakeClock
from miner_guard.system.processes import Process
from miner_guard.watch import evidence
from miner_guard.watch import evidence as evidence_folders
from miner_guard.watch.evidence import Subject

WAITS_IN_THE_KERNEL = """
import ctypes, os, time
if ctypes.CDLL(None).vfork() == 0:
    # The parent waits in the kernel, uninterruptibly, as for an unresponsive disk.
    os.write(1, b"x")
    time.sleep(60)
"""


@pytest.fixture
def blocked() -> Iterator[Process]:
    """A process in D state."""
    child = subprocess.Popen(
        [sys.executable, "-c", WAITS_IN_THE_KERNEL], stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None
    try:
        # A starting interpreter is in D state for moments too, while it reads its files.
        assert child.stdout.read(1) == b"x"
        deadline = time.monotonic() + 20
        while (seen := processes.stat(child.pid)) is None or seen.state != "D":
            assert time.monotonic() < deadline, f"state {seen and seen.state}"
            time.sleep(0.05)
        yield seen.process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(10)
        child.stdout.close()


def test_a_rank_in_d_state_is_reported_in_words(blocked: Process) -> None:
    identity: Any = SimpleNamespace(pid=blocked.pid)
    view = evidence._kernel_view(Subject(0, identity, None, gone=False))
    assert view["state"].startswith("uninterruptible (D state)")
    assert "SIGKILL does not help" in view["state"]
    (thread,) = view["threads"].values()
    assert set(thread) == {"wchan", "syscall"}


def test_a_process_that_survives_sigkill_is_named_and_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher, stuck = Process(2**22 + 1, 1), Process(2**22 + 2, 2)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(
        processes,
        "send",
        lambda process, *numbers: sent.extend((process.pid, n) for n in numbers) or True,
    )
    clock = FakeClock()
    fake_time = SimpleNamespace(monotonic=clock.monotonic, thread_time=time.thread_time)
    monkeypatch.setattr("miner_guard.keeper.teardown.time", fake_time)
    teardown = Teardown(lambda: {stuck}, launcher, 0.0)
    teardown.ended()
    begin = clock.monotonic()
    while (wait := teardown.step()) is not None:
        clock.advance(wait)
        assert clock.monotonic() - begin < 60
    assert teardown.stuck == [stuck]
    assert (stuck.pid, signal.SIGTERM) in sent
    assert (stuck.pid, signal.SIGKILL) in sent
    assert clock.monotonic() - begin == pytest.approx(TERM_TO_KILL_S + UNKILLABLE_S, abs=1.0)


def test_the_newest_folders_are_kept_and_unrelated_ones_left_alone(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    for second in range(10):
        own = evidence_folders.incident_folder(
            state, 1_800_000_000.0 + second, "hang" if second % 2 else "cuda_oom"
        )
        own.mkdir(parents=True)
        (own / "flight-rank-0000.jsonl").write_text("{}\n")
    (state.incidents / "my-notes").mkdir()
    newest = sorted(state.incidents.glob("2*"))[-3:]
    evidence_folders.prune_incidents(state, 3)
    assert sorted(state.incidents.iterdir()) == sorted([*newest, state.incidents / "my-notes"])
    evidence_folders.prune_incidents(state, 3)
    evidence_folders.prune_incidents(StateDir(tmp_path / "none"), 3)
    assert len(list(state.incidents.iterdir())) == 4
