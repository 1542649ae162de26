"""Problems around the guard itself: it honours a stop, `status` answers, and nothing spins."""

from __future__ import annotations

import os
import sys
import time

import pytest

from miner_guard.guard.control_socket import ask
from tests.faults.guarded import Guarded, until

FAST = {"miner.stop_timeout_s": 3, "restart.backoff_s": 0.1}
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"

ZOMBIES = """
import os, sys, time
for n in range(int(sys.argv[1])):
    if os.fork() == 0:
        # Its child is an orphan at once, and then a zombie of the process that adopts it.
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.wait()
print('all dead', flush=True)
time.sleep(600)
"""


def start(guarded: Guarded, code: str = SLEEPER, *arguments: object) -> None:
    words = [sys.executable, "-u", "-c", f"{code} # {guarded.token}", *map(str, arguments)]
    guarded.start(words, settings=FAST)


def test_a_pipe_in_place_of_the_log_blocks_neither_the_guard_nor_its_stop(guarded: Guarded) -> None:
    """When guard.jsonl was a FIFO without a reader, the main thread hung while opening it, and the
    stop hung too."""
    start(guarded)
    guarded.wait_for("miner_started")
    log = guarded.state.log
    log.rename(log.with_name("guard.jsonl.moved"))
    os.mkfifo(log)
    # The guard's own next line runs into it.
    assert ask(guarded.state, {"do": "pause"})["done"]
    until(lambda: b"guard.jsonl cannot be written" in guarded.output.read_bytes(), 30, guarded.tail)
    # The watchdog would end a stop that waits for the pipe, with another code.
    assert guarded.stop(seconds=120) == 0
    guarded.assert_nothing_left()


@pytest.mark.parametrize("count", [500, pytest.param(4000, marks=pytest.mark.long)])
def test_status_answers_during_a_storm_of_zombies(guarded: Guarded, count: int) -> None:
    """Every orphan becomes the supervisor's child; reaping them must not keep it from answering."""
    start(guarded, ZOMBIES, count)
    guarded.wait_for("miner_started")
    slowest = 0.0
    while b"all dead" not in guarded.output.read_bytes():
        asked = time.monotonic()
        assert ask(guarded.state, {"do": "status"})["status"]["state"] == "running"
        slowest = max(slowest, time.monotonic() - asked)
        time.sleep(0.1)
    assert slowest < 2.0
    assert guarded.stop() == 0
    guarded.assert_nothing_left()
