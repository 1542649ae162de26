"""The memory tier under a real guard and real ranks: after each kill, training resumes at most one
step back; after a power loss, it resumes from disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.faults.guarded import Guarded
from tests.faults.restarted_demo import ON_DISK_EVERY, RestartedDemo

pytestmark = [pytest.mark.long, pytest.mark.timeout(500)]


def test_after_each_kill_from_memory_and_after_power_loss_from_disk(
    guarded: Guarded, tmp_path: Path
) -> None:
    training = RestartedDemo(guarded, tmp_path)
    training.start()
    for victims in ("one rank", "all ranks", "the guard"):
        at = training.past_a_checkpoint()
        ranks, guard = training.ranks(), guarded.processes[-1]
        if victims == "the guard":
            training.kill(guard.pid)
            guard.wait(30)
            guarded.assert_nothing_left(30)
            training.start()
        else:
            training.kill(*(ranks if victims == "all ranks" else ranks[1:]))
        resumed = training.resume()
        assert resumed["path"].startswith("/dev/shm/"), victims
        assert resumed["step"] >= at - 1, victims
    training.reach(ON_DISK_EVERY + 2)
    guard = guarded.processes[-1]
    training.kill(guard.pid)
    guard.wait(30)
    guarded.assert_nothing_left(30)
    # A power loss erases this.
    shutil.rmtree(guarded.state.memory)
    training.start()
    resumed = training.resume()
    assert not resumed["path"].startswith("/dev/shm/")
    assert resumed["step"] % ON_DISK_EVERY == 0
    assert resumed["step"] > 0
    assert guarded.stop() == 0
    guarded.assert_nothing_left(30)
    assert not guarded.state.memory.exists() or not list(guarded.state.memory.iterdir())
