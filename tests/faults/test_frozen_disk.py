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


def test_a_frozen_disk_costs_a_rank_no_step(guarded: Guarded, disk: OwnDisk) -> None:
    """With its flight record on that disk, a rank once hung in a write to its own memory."""
    guarded.start(
        guarded.miner("steps", 10**6, 0.02, "finish"), settings={"logs.step_lines_per_s": 100}
    )
    guarded.wait_for("inner_step", 20)
    disk.freeze()
    before, begin = guarded.output.read_bytes().count(b"Inner Step: "), time.monotonic()
    until(lambda: b"DISK STUCK: " in guarded.output.read_bytes(), 30, guarded.tail)
    steps = guarded.output.read_bytes().count(b"Inner Step: ") - before
    assert steps / (time.monotonic() - begin) > 20, "of 50 steps a second"
    assert guarded.stop(seconds=60) == 0
    disk.thaw()


def test_lines_logged_while_the_disk_was_frozen_are_there_after_the_thaw(
    guarded: Guarded, disk: OwnDisk
) -> None:
    start(guarded)
    disk.freeze()
    until(lambda: b"DISK STUCK: " in guarded.output.read_bytes(), 30, guarded.tail)
    time.sleep(1.0)
    disk.thaw()
    guarded.wait_for("disk_stuck", 2)
    assert [event["level"] for event in guarded.named("disk_stuck")] == ["critical", "info"]
    assert guarded.named("disk_stuck")[1]["lost"] == 0
    times = [event["ts"] for event in guarded.named("health_snapshot")]
    assert len(times) > 10, "none is missing"
    assert guarded.stop() == 0
