"""The loop stays awake: no exception, no lost wake-up and no signal handler makes it deaf."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from miner_guard.guard.loop import Loop
from miner_guard.system.clock import SystemClock


@pytest.fixture
def errors() -> list[Exception]:
    return []


@pytest.fixture
def loop(errors: list[Exception]) -> Iterator[Loop]:
    made = Loop(SystemClock(), errors.append)
    yield made
    made.close()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def turn(loop: Loop, times: int = 1) -> None:
    for _ in range(times):
        loop.after(0.01, lambda: None)
        loop.turn()


def fail() -> None:
    raise RuntimeError("a defect")


def test_a_signal_is_heard_after_its_handler_failed(loop: Loop, errors: list[Exception]) -> None:
    """One exception in any signal handler once released the wake-up pipe and left the guard
    deaf."""
    heard: list[int] = []

    def once() -> None:
        heard.append(len(heard))
        if len(heard) == 1:
            fail()

    loop.on_signal(signal.SIGUSR1, once)
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGUSR1)
        turn(loop)
    assert heard == [0, 1, 2]
    assert len(errors) == 1


def test_a_signal_that_does_not_wake_the_loop_is_heard_at_its_next_turn(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop once waited for a byte that never came through the pipe."""
    heard: list[str] = []
    loop.on_signal(signal.SIGUSR1, lambda: heard.append("stop"))
    monkeypatch.setattr(loop, "wake", lambda: None)
    os.kill(os.getpid(), signal.SIGUSR1)
    turn(loop)
    assert heard == ["stop"]


def test_a_timer_that_fails_each_time_keeps_its_pace(loop: Loop, errors: list[Exception]) -> None:
    loop.every(0.001, fail)
    while len(errors) < 3:
        loop.turn()


def test_a_report_that_fails_as_well_ends_nothing(loop: Loop) -> None:
    """A broken log must not take the miner down with it."""

    def broken(_error: Exception) -> None:
        raise OSError(28, "No space left on device")

    loop.on_error = broken
    loop.soon(fail)
    turn(loop)
    done: list[bool] = []
    loop.soon(lambda: done.append(True))
    turn(loop)
    assert done == [True]


def test_a_descriptor_whose_handler_fails_costs_no_core(
    loop: Loop, errors: list[Exception]
) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"x")
    loop.watch(reading, fail)
    began = time.process_time()
    for _ in range(3):
        loop.turn()
    assert time.process_time() - began < 0.1
    assert len(errors) == 3
    loop.unwatch(reading)
    turn(loop)
    assert len(errors) == 3
    os.close(reading)
    os.close(writing)


def test_a_wait_that_fails_does_not_end_the_guard(
    loop: Loop, errors: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single OSError from epoll would otherwise have ended the guard, and the miner."""
    whole = loop._selector.select
    answers = iter([OSError(12, "Cannot allocate memory")])

    def select(timeout: float | None = None) -> object:
        for error in answers:
            raise error
        return whole(timeout)

    monkeypatch.setattr(loop._selector, "select", select)
    called = threading.Event()
    loop.soon(called.set)
    loop.turn()
    loop.turn()
    assert called.is_set()
    assert [type(error) for error in errors] == [OSError]
