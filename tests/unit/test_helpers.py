"""The guard's cost includes its helpers, whether running or ended."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from miner_guard.system.probe import HelperCpu
from miner_guard.system.processes import HELPER

_BURN = """import sys, time
while time.process_time() < float(sys.argv[1]): pass
print("burnt", flush=True)
sys.stdin.read()"""
_COMMAND = [sys.executable, "-S", "-c", _BURN]


def _helper(seconds: float) -> subprocess.Popen[bytes]:
    """A helper that has used this much CPU time and waits until its stdin ends."""
    child = subprocess.Popen(
        [*_COMMAND, str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, HELPER: "1"},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"burnt\n"
    return child


@pytest.fixture
def helper() -> Iterator[subprocess.Popen[bytes]]:
    with _helper(0.3) as child:
        yield child
        child.kill()


def test_a_running_helper_counts_and_still_counts_once_it_has_ended(
    helper: subprocess.Popen[bytes],
) -> None:
    cpu = HelperCpu()
    while_running = cpu.read()
    assert 0.25 <= while_running < 3.0
    helper.communicate()
    assert while_running <= cpu.read() < while_running + 1.0


def test_a_helper_of_another_thread_counts_however_briefly_it_lived() -> None:
    """The CPU time of senders and probes that end between two samples must be counted too."""
    cpu = HelperCpu()
    thread = threading.Thread(target=lambda: _helper(0.3).communicate())
    thread.start()
    thread.join()
    assert 0.25 <= cpu.read() < 3.0
