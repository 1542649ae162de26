"""A rank with its clock, its state directory and a listening supervisor."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from miner_guard.rank.guard import Guard
from miner_guard.rank.hot import PYTHON_HOOK, compiled
from miner_guard.state_dir import StateDir
from tests.unit.rank.helpers import Clock, place


@pytest.fixture(params=["compiled", "python"], autouse=True)
def hot_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both hot paths pass the same tests."""
    if request.param == "python":
        monkeypatch.setenv(PYTHON_HOOK, "1")
    else:
        monkeypatch.delenv(PYTHON_HOOK, raising=False)
        module, why = compiled()
        if module is None:
            if os.environ.get("CI") == "true":
                pytest.fail(f"the compiled hook is {why}")
            pytest.skip(f"the compiled hook is {why}: pip install -e . with a C compiler builds it")
    return str(request.param)


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
