"""control.sock: answers come from the supervisor's thread, whatever a client sends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miner_guard.guard.control_socket import ControlSocket, NotRunning, ask
from miner_guard.guard.loop import Loop
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import SystemClock

COMMAND = "x" * 1_500_000
"""`status` must not say that no guard is running: a socket accepts 200 KB at once, but a command
can have up to 2 MB."""


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDir]:
    state = StateDir(tmp_path)
    loop = Loop(SystemClock(), lambda error: pytest.fail(repr(error)))
    control = ControlSocket(state, loop.soon, lambda request: {"command": COMMAND, **request})
    over = threading.Event()

    def turn() -> None:
        while not over.is_set():
            loop.after(0.01, lambda: None)
            loop.turn()

    supervisor = threading.Thread(target=turn)
    supervisor.start()
    yield state
    control.close()
    over.set()
    supervisor.join(10)
    loop.close()
    assert not state.control.exists()


def send(state: StateDir, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(state.control))
        client.sendall(data)
        return client.makefile("rb").readline()


def test_a_long_answer_arrives_whole_although_another_client_is_silent(state: StateDir) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(state.control))
        answer: Any = ask(state, {"do": "x"})
    assert (answer["command"], answer["do"]) == (COMMAND, "x")
    assert state.control.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("line", [b"[" * 60_000, b"x\n", b"[]\n", b"\xff\n"])
def test_a_request_that_makes_no_sense_gets_an_answer(state: StateDir, line: bytes) -> None:
    """Input that anyone may send must not cause an internal error."""
    assert b"error" in send(state, line.ljust(70_000) if line[-1:] != b"\n" else line)


def test_without_a_guard_the_client_learns_that(tmp_path: Path) -> None:
    with pytest.raises(NotRunning):
        ask(StateDir(tmp_path), {"do": "status"})
