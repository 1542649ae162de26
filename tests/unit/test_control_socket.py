"""control.sock without free descriptors: it pauses, and answers once one is free."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miner_guard.guard import loop as loop_module
from miner_guard.guard.control_socket import ControlSocket, ask
from miner_guard.guard.loop import Loop
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import SystemClock
from tests.support.waiting import until


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop(SystemClock(), lambda error: pytest.fail(repr(error)))
    yield made
    made.close()


def test_a_guard_without_descriptors_does_not_spin_and_answers_later(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiting client once made the socket ready each time, which cost 27,000 loop iterations a
    second."""
    monkeypatch.setattr(loop_module, "REST_S", 0.3)
    control = ControlSocket(StateDir(tmp_path), loop, lambda _request: {"done": "yes"})
    whole, refused = control._socket, 0

    class Exhausted:
        def accept(self) -> Any:
            nonlocal refused
            refused += 1
            raise OSError(errno.EMFILE, "Too many open files")

        def __getattr__(self, name: str) -> Any:
            return getattr(whole, name)

    monkeypatch.setattr(control, "_socket", Exhausted())
    answers: list[Any] = []
    client = threading.Thread(
        target=lambda: answers.append(ask(StateDir(tmp_path), {"do": "x"}, 30.0))
    )
    client.start()
    turns = 0
    while refused < 3:
        loop.turn()
        turns += 1
    assert turns < 50
    monkeypatch.setattr(control, "_socket", whole)

    def answered() -> bool:
        loop.after(0.01, lambda: None)
        loop.turn()
        return bool(answers)

    until(answered, 30, "the answer")
    client.join(10)
    assert [answer["done"] for answer in answers] == ["yes"]
    control.close()
    assert isinstance(whole, socket.socket)


def test_a_request_nested_too_deeply_gets_an_answer(loop: Loop, tmp_path: Path) -> None:
    """Input that anyone may send must not cause an internal error."""
    control = ControlSocket(StateDir(tmp_path), loop, lambda _request: {"done": "yes"})
    try:
        assert b"not JSON" in control._answer(b"[" * 60_000)
    finally:
        control.close()
