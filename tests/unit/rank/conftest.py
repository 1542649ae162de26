"""A rank with its clock, its state directory and a listening supervisor."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from miner_guard.rank.guard import Guard
from miner_guard.state_dir import StateDir
from tests.unit.rank.helpers import Clock, place


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)


@pytest.fixture
def listener(state: StateDir) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(state.socket))
        yield server


@pytest.fixture
def guard(state: StateDir, listener: socket.socket, clock: Clock) -> Guard:
    return Guard(place(state), clock)
