"""The state directory is on an unresponsive disk: training, its output and a stop never wait for
it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from miner_guard.state_dir import StateDir
from tests.faults.guarded import Guarded, until
from tests.faults.own_disk import OwnDisk

MINER = """
import time
for n in range(10**6):
    print('line', n, flush=True)
    time.sleep(0.02)
"""


@pytest.fixture
def disk(tmp_path: Path, guarded: Guarded) -> Iterator[OwnDisk]:
    try:
        made = OwnDisk(tmp_path)
    except OSError as error:
        pytest.skip(str(error))
    guarded.state = StateDir(made.place / "state")
    yield made
    made.close()


def start(guarded: Guarded) -> None:
    settings = {"miner.stop_timeout_s": 3, "health.snapshot_every_s": 0.5}
    guarded.start([sys.executable, "-c", f"{MINER} # {guarded.token}"], settings=settings)
    guarded.wait_for("health_snapshot", 2)


def printed(guarded: Guarded) -> int:
    return guarded.output.read_bytes().count(b"\nline ")


def test_a_frozen_disk_neither_slows_the_miner_nor_blocks_a_stop(
    guarded: Guarded, disk: OwnDisk
) -> None:
    """Training once stopped silently when the guard's log did: 0 steps in 8 s."""
    start(guarded)
    disk.freeze()
    before, begin = printed(guarded), time.monotonic()
    until(lambda: b"DISK STUCK: " in guarded.output.read_bytes(), 30, guarded.tail)
    rate = (printed(guarded) - before) / (time.monotonic() - begin)
    assert rate > 20, "of 50 lines a second"
    # The watchdog would end a stop that waits for the disk, with another code.
    assert guarded.stop(seconds=120) == 0
    assert b"the disk is not responding" in guarded.output.read_bytes()
    disk.thaw()
