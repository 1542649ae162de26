"""None of the guard's helpers outlives it, whichever thread started it and whatever suspended
it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from miner_guard.system.probe import end_helpers

Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a helper that never ends by itself."""
    started: list[subprocess.Popen[bytes]] = []

    def begin() -> subprocess.Popen[bytes]:
        program = "import time; print(flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-S", "-c", program], stdout=-1)
        assert child.stdout is not None
        child.stdout.readline()
        started.append(child)
        return child

    yield begin
    for child in started:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def test_a_suspended_helper_ends(start: Start) -> None:
    helper = start()
    helper.send_signal(signal.SIGSTOP)
    end_helpers(10.0)
    assert helper.wait(1) == -signal.SIGKILL


def test_a_helper_that_another_thread_started_ends(start: Start) -> None:
    started: list[subprocess.Popen[bytes]] = []
    release = threading.Event()

    def work() -> None:
        started.append(start())
        release.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    while not started:
        time.sleep(0.01)
    end_helpers(10.0)
    release.set()
    thread.join()
    assert started[0].wait(1) == -signal.SIGKILL


def test_the_guards_exit_waits_no_longer_than_it_may(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A helper in uninterruptible sleep does not die."""
    monkeypatch.setattr("psutil.Process.kill", lambda process: None)
    helper = start()
    began = time.monotonic()
    end_helpers(0.1)
    assert time.monotonic() - began < 5
    assert helper.poll() is None
