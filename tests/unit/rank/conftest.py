"""A rank with its clock, its state directory and a guard that listens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from miner_guard.rank.guard import Guard
from miner_guard.state_dir import StateDir
from tests.support.ranks import Ranks, listening
from tests.unit.rank.helpers import Clock, place


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with listening() as listener:
        yield listener


@pytest.fixture
def guard(state: StateDir, ranks: Ranks, clock: Clock) -> Guard:
    return Guard(place(state, ranks), clock)
