"""Peers and AllReduces, parsed from the lines that each program prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from miner_guard.config import Config, MinerSettings
from miner_guard.eventlog.catalog import message
from miner_guard.record.events import Event
from miner_guard.system.clock import FakeClock
from miner_guard.watch.base import Launch
from miner_guard.watch.chain import SwarmMonitor
from tests.support.contexts import context
from tests.support.output import show

PRIME = "[Rank 0] step: {n}, loss: 6.5, tokens_per_second: 3.1, mfu: 4.5, diloco_peers: {p}"
HIVEMIND = "run has taken 4 local steps. Peers: {p}, epoch: 3, steps: {n}. ETA: 1.20"
IOTA = "🔄 Attempting to merge {p} weight partitions..."


class Swarm:
    """One launch under a profile."""

    def __init__(self, folder: Path, profile: str | None) -> None:
        self.clock = FakeClock()
        settings = Config(miner=MinerSettings(profile=profile))
        self.monitor = SwarmMonitor(context(folder, config=settings, clock=self.clock))
        self.launch()

    def launch(self) -> None:
        launch = Launch(("miner",), 1, 0, self.clock.monotonic())
        assert list(self.monitor.on_launch(launch)) == []

    def line(self, text: str) -> list[Event]:
        self.clock.advance(10)
        return show(self.monitor, f"{text}\n".encode())


@pytest.mark.parametrize(
    ("profile", "form"), [("diloco", PRIME), ("diloco", HIVEMIND), ("iota", IOTA)]
)
def test_peers_that_leave_and_join_are_reported(tmp_path: Path, profile: str, form: str) -> None:
    swarm = Swarm(tmp_path, profile)
    assert swarm.line(form.format(n=1, p=5)) == []
    assert swarm.line(form.format(n=2, p=5)) == []
    (lost,) = swarm.line(form.format(n=3, p=3))
    assert (lost.level, message(lost)) == ("warning", "PEERS LOST: 3 of 5 take part")
    (joined,) = swarm.line(form.format(n=4, p=5))
    assert (joined.level, message(joined)) == ("info", "PEERS JOINED: 5 take part, 3 before")
    assert swarm.monitor.snapshot()["peers"] == 5


def test_peers_that_come_and_go_at_every_step_are_one_warning(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, "diloco")
    found = [f for n in range(40) for f in swarm.line(PRIME.format(n=n, p=4 + n % 2))]
    assert [f.name for f in found if f.level != "debug"] == ["peers_joined", "peers_lost"]


def test_a_new_launch_has_not_lost_the_peers_of_the_one_before(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, "diloco")
    swarm.line(PRIME.format(n=1, p=5))
    swarm.launch()
    assert swarm.monitor.snapshot()["peers"] is None
    assert swarm.line(PRIME.format(n=1, p=1)) == []


@pytest.mark.parametrize(
    ("profile", "line", "words"),
    [
        ("sn38", "AllReduce Operation Finished Succesfully", "ALLREDUCE finished"),
        ("sn38", "All Reduce Failed At Checkpoint 2", "ALLREDUCE failed: At Checkpoint 2"),
        ("sn38", "All Reduce Failed with error: no group", "ALLREDUCE failed: no group"),
        ("iota", "✅ Successfully uploaded merged 4 partitions", "ALLREDUCE finished"),
        ("iota", "❌ Miner 5Fxx failed to sync weights: 503", "ALLREDUCE failed: 503"),
        ("diloco", "Time taken for gradient all reduce: 12.5 sec", "ALLREDUCE finished"),
        (
            "diloco",
            "Failed to sync pseudo gradient after retries. Falling back to local calculation",
            "ALLREDUCE failed: Failed to sync pseudo gradient after retries",
        ),
    ],
)
def test_the_end_of_an_allreduce_is_reported(
    tmp_path: Path, profile: str, line: str, words: str
) -> None:
    swarm = Swarm(tmp_path, profile)
    (end,) = swarm.line(line)
    assert message(end) == words
    outcome = words.split()[1].rstrip(":")
    assert swarm.monitor.snapshot()["allreduces"][outcome] == 1
    assert swarm.monitor.snapshot()["last"]["outcome"] == outcome


def test_without_such_patterns_no_output_is_requested(tmp_path: Path) -> None:
    assert Swarm(tmp_path, None).monitor.words == frozenset()
    assert Swarm(tmp_path / "sn38", "sn38").monitor.words is None
