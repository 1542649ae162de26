"""Problems around the guard itself: it honours a stop, `status` answers, and nothing spins."""

from __future__ import annotations

import os
import sys

from miner_guard.guard.control_socket import ask
from tests.faults.guarded import Guarded, until

FAST = {"miner.stop_timeout_s": 3, "restart.backoff_s": 0.1}
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"


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
