"""The supervisor's states where things come in the wrong order, or do not come."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from miner_guard import events
from miner_guard.clock import FakeClock
from miner_guard.config import Config, HangSettings
from miner_guard.events import Finding
from miner_guard.flight_recorder.records import Now
from miner_guard.statedir import StateDir
from miner_guard.supervisor import evidence
from miner_guard.supervisor.core import FAILED, Supervisor
from miner_guard.supervisor.evidence import Gathered
from miner_guard.supervisor.host import Host
from miner_guard.supervisor.loop import Loop
from miner_guard.supervisor.orders import Order, Wish
from miner_guard.supervisor.parts import Launch
from miner_guard.supervisor.parts.hang import HangWatch
from miner_guard.supervisor.processes import Process
from miner_guard.supervisor.teardown import Teardown
from tests.idle import context


@pytest.fixture
def said() -> list[Finding]:
    return []


@pytest.fixture
def supervisor(tmp_path: Path, said: list[Finding]) -> Iterator[Supervisor]:
    """One without a miner: its pipes can't be had, so that every launch fails at once."""

    def no_pipes() -> tuple[int, int]:
        raise OSError(24, "Too many open files")

    clock = FakeClock()
    loop = Loop(clock, lambda error: pytest.fail(repr(error)))
    order = Order(("true",), lambda _launch: dict(os.environ), Config(), StateDir(tmp_path), "r1")
    nothing: Any = SimpleNamespace(
        open=no_pipes, close_sources=lambda: None, drain=lambda: True, last_look=lambda _host: None,
        all_finished=lambda: False,
    )  # fmt: skip
    yield Supervisor(order, clock, loop, Host(said.append), nothing, nothing)
    loop.close()


def test_a_launch_without_descriptors_is_a_failure_that_is_tried_again(
    supervisor: Supervisor, said: list[Finding]
) -> None:
    """Guards against a guard that waits for ever with nothing running and nothing planned."""
    supervisor._first_launch()
    assert supervisor.state == "waiting"
    assert [finding.event for finding in said] == ["miner_exited", "miner_restarting"]
    assert "Too many open files" in said[0].fields["how"]


def test_a_restart_meant_for_a_launch_that_has_ended_does_not_cut_the_wait_short(
    supervisor: Supervisor, said: list[Finding]
) -> None:
    """Guards against the watchdog of a hang whose miner gave up first: its wish came while the next start waited."""
    supervisor._first_launch()
    supervisor.want(Wish("hang: rank 0 in data for 912s", "restart"))
    supervisor.loop.drain()
    assert (supervisor.state, len(said)) == ("waiting", 2)


def test_a_launcher_that_sigkill_does_not_end_does_not_keep_the_guard(supervisor: Supervisor) -> None:
    """Guards against a stop that never comes: a process in D state is never reaped."""
    launcher = Process(2**22 + 1, 1)
    child: Any = SimpleNamespace(pid=launcher.pid, process=launcher, code=lambda: None, signal=None)
    supervisor.child, supervisor.state, supervisor._wish = child, "stopping", Wish("SIGTERM", "stop")
    supervisor._ended(child, Teardown(supervisor.clock, set, launcher, 1.0, stuck=[launcher]))
    assert (supervisor.state, supervisor.exit_code) == ("done", 0)
    assert supervisor.last_exit is not None
    assert supervisor.last_exit.code == 137
    assert FAILED != 137


def test_who_asks_again_for_the_end_is_told_what_it_waits_for(supervisor: Supervisor, said: list[Finding]) -> None:
    """Guards against a second Ctrl-C that is swallowed for 45 s, so that the next one is SIGKILL to the guard."""
    clock = cast(FakeClock, supervisor.clock)
    launcher = Process(2**22 + 1, 1)
    supervisor.child = cast(Any, SimpleNamespace(pid=launcher.pid, process=launcher, code=lambda: None, signal=None))
    supervisor.state, supervisor._wish = "stopping", Wish("SIGINT", "stop")
    supervisor._teardown = Teardown(clock, set, launcher, 45.0)
    supervisor._teardown.ask()
    clock.advance(15.0)
    for _ in range(3):
        supervisor.want(Wish("SIGINT", "stop"))
    supervisor.loop.drain()
    (finding,) = said
    assert events.line(finding) == (
        f"MINER STOPPING: SIGINT, and it is ending already: pid {launcher.pid} has had SIGTERM and has not ended; "
        "SIGKILL comes next, 32s to stop"
    )


def test_a_stop_during_a_restart_is_heard(supervisor: Supervisor, said: list[Finding]) -> None:
    """Guards against a first Ctrl-C without a word, because the guard was already ending the launch for a restart."""
    launcher = Process(2**22 + 1, 1)
    supervisor.child = cast(Any, SimpleNamespace(pid=launcher.pid, process=launcher, code=lambda: None, signal=None))
    supervisor.state, supervisor._wish = "stopping", Wish("hang: rank 0 in data", "restart")
    supervisor._teardown = Teardown(supervisor.clock, set, launcher, 45.0)
    supervisor._teardown.ask()
    supervisor.want(Wish("SIGTERM", "stop"))
    supervisor.loop.drain()
    assert [finding.event for finding in said] == ["miner_stopping"]
    assert supervisor._wish.then == "stop"


class _Later:
    """A job's thread that is slow: it runs when the test says so."""

    def __init__(self) -> None:
        self.work: list[Any] = []

    def every(self, *_arguments: Any, **_more: Any) -> None: ...

    def once(self, _name: str, work: Any) -> None:
        self.work.append(work)


class _Orders:
    def __init__(self) -> None:
        self.restarts: list[str] = []

    def restart(self, cause: str) -> None:
        self.restarts.append(cause)


@pytest.mark.parametrize(("meanwhile", "restarts"), [("nothing", 1), ("a step", 0), ("another launch", 0)])
def test_a_hang_that_is_over_when_its_evidence_is_there_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[Finding], meanwhile: str, restarts: int
) -> None:
    """Guards against a launch that pays for the one before it: gathering stacks takes up to half a minute."""
    monkeypatch.setattr(evidence, "gather", lambda *_arguments: Gathered((), None))
    clock, jobs, orders = FakeClock(), _Later(), _Orders()
    config = replace(Config(), hang=HangSettings(min_s=5.0, first_step_s=5.0, action="restart"))
    watch = HangWatch(context(tmp_path, config=config, clock=clock, emit=said.append, jobs=jobs, control=orders))
    watch.on_launch(Launch(("true",), 1, 0, clock.monotonic()))
    ranks: Mapping[int, Now] = {0: Now("running", "data", 0.0, 0.0, 1, 1, 1, None, None, None, None, 1, 0, 0, 0)}
    for _ in range(8):
        clock.advance(1.0)
        list(watch.on_tick(clock.monotonic(), ranks))
    (gather,) = jobs.work
    if meanwhile == "a step":
        watch.on_steps(0, [cast(Any, SimpleNamespace(end=clock.monotonic(), seconds=9.0, phases={}))])
    elif meanwhile == "another launch":
        watch.on_launch(Launch(("true",), 2, 1, clock.monotonic()))
    gather()
    assert len(orders.restarts) == restarts
    assert any("left alone" in str(finding.fields.get("detail")) for finding in said) == (restarts == 0)
