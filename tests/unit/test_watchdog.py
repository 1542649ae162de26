"""The guard's own watchdog: a stop ends the miner even while the loop hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from miner_guard.guard import watchdog
from miner_guard.guard.loop import Loop
from miner_guard.guard.teardown import Teardown
from miner_guard.guard.watchdog import SILENT_S, Hands, Watchdog
from miner_guard.record.events import Event
from miner_guard.system import processes
from miner_guard.system.clock import FakeClock
from miner_guard.system.processes import Process
from tests.support.waiting import until

GRACE_S = 10.0


class Left(Exception):
    """Stands in for the exit of the process."""


class Scene:
    """A loop that runs when the test says so, a launch that ends when it is signalled, and a clock
    that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = FakeClock()
        self.loop = Loop(self.clock, lambda _error: None)
        self.loop.alive()
        self.events: list[Event] = []
        self.signals: list[int] = []
        self.lives = True
        self.deaf = False
        self.exits: list[int] = []
        self.dumps: list[str] = []
        monkeypatch.setattr(processes, "alive", lambda _process: self.lives)
        monkeypatch.setattr(processes, "send", self._send)
        monkeypatch.setattr(watchdog, "_dump", self.dumps.append)
        hands = Hands(
            self.events.append,
            self._teardown,
            self._leave,
            self.clock.monotonic,
            self.clock.advance,
        )
        self.dog = Watchdog(self.loop, GRACE_S, hands)

    def _teardown(self) -> Teardown | None:
        return Teardown(self.clock, set, Process(2**22 + 1, 1), GRACE_S) if self.lives else None

    def _send(self, _process: Process, *numbers: int) -> bool:
        self.signals += numbers
        if signal.SIGKILL in numbers or not self.deaf:
            self.lives = False
        return True

    def _leave(self, code: int) -> None:
        self.exits.append(code)
        raise Left

    def pass_time(self, seconds: float, *, turning: bool = True) -> None:
        """Let time pass, in checks of half a second."""
        for _ in range(int(seconds * 2)):
            self.clock.advance(0.5)
            if turning:
                self.loop.alive()
            self.dog.check()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(monkeypatch)
    yield made
    made.loop.close()


def test_a_loop_that_runs_is_left_alone(scene: Scene) -> None:
    scene.pass_time(600.0)
    assert not scene.events
    assert scene.lives


def test_a_hanging_loop_is_reported_once_with_its_stack_and_the_miner_keeps_running(
    scene: Scene,
) -> None:
    scene.pass_time(60.0, turning=False)
    (event,) = scene.events
    assert event.name == "guard_wedged"
    assert any("test_watchdog" in line for line in event.fields["stack"])
    assert scene.lives
    assert not scene.exits


def test_a_stop_of_a_hanging_loop_ends_the_miner_and_leaves_the_stacks(scene: Scene) -> None:
    """A wedged guard must still honour a stop."""
    scene.dog.stop_asked()
    with pytest.raises(Left):
        scene.pass_time(60.0, turning=False)
    assert scene.signals[0] == signal.SIGTERM
    assert not scene.lives
    assert scene.exits == [1]
    assert scene.dumps == ["the supervisor's loop is hung"]


def test_a_miner_that_ignores_sigterm_has_its_grace_and_no_more(scene: Scene) -> None:
    scene.deaf = True
    scene.dog.stop_asked()
    asked = scene.clock.monotonic()
    with pytest.raises(Left):
        scene.pass_time(120.0, turning=False)
    assert signal.SIGKILL in scene.signals
    assert GRACE_S <= scene.clock.monotonic() - asked <= GRACE_S + SILENT_S + 10.0


def test_a_stop_without_progress_ends_although_the_loop_keeps_running(scene: Scene) -> None:
    """A defect may recur in every loop iteration during a stop."""
    scene.dog.stop_asked()
    with pytest.raises(Left):
        scene.pass_time(120.0)
    assert not scene.lives


def test_a_loop_that_wakes_up_ends_the_guard_itself(scene: Scene) -> None:
    scene.dog.stop_asked()
    scene.pass_time(SILENT_S - 1.0, turning=False)
    scene.pass_time(2.0)
    assert scene.lives, "the loop ends it, with its grace"
    assert not scene.exits


def test_a_guard_that_was_suspended_is_not_reported_as_hung(scene: Scene) -> None:
    """After SIGSTOP, a debugger or a suspended host nothing has run, so an alarm would be false."""
    scene.clock.advance(3600.0)
    scene.dog.check()
    assert not scene.events


def test_the_process_ends_with_its_own_code_although_its_last_steps_hang(scene: Scene) -> None:
    """A job on a dead disk must not keep the interpreter from ending."""
    scene.dog.leaving(75, 5.0)
    with pytest.raises(Left):
        scene.pass_time(6.0)
    assert scene.exits == [75]


def test_a_stop_signal_is_noted_without_the_loop(
    monkeypatch: pytest.MonkeyPatch, scene: Scene, tmp_path: Path
) -> None:
    """The main thread may be running no Python; the watchdog's thread then reads the C handler's
    byte."""
    before = signal.signal(signal.SIGPWR, lambda _number, _frame: None)
    wakeup = signal.set_wakeup_fd(-1)
    try:
        scene.dog.start()
        os.kill(os.getpid(), signal.SIGPWR)
        until(lambda: cast(Any, scene.dog)._asked_at is not None, 30, "the watchdog")
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGPWR, before)
