"""The hang monitor: it reports a miner whose steps it can't see as not visible, not as hanging."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miner_guard.config import Config, HangSettings, MinerSettings
from miner_guard.rank.agree import LATE
from miner_guard.rank.layout import Now
from miner_guard.record.events import Event, event
from miner_guard.system.clock import FakeClock
from miner_guard.watch.base import Exit, Launch
from miner_guard.watch.hang import HangMonitor
from tests.support.contexts import JobsAtOnce, JobsLater, Steered, context

HANG = HangSettings(min_s=10.0, first_step_s=60.0)
STARTING = Now("starting", "", 0.0, 0.0, None, None, 0, None, None, None, None, 1)


def hang_watch(folder: Path, **given: Any) -> tuple[HangMonitor, FakeClock, list[Event]]:
    """The monitor after a launch, its clock, and the events that its jobs emit."""
    clock, emitted = FakeClock(), []  # type: ignore[var-annotated]
    defaults: dict[str, Any] = {
        "config": replace(Config(), hang=HANG),
        "jobs": JobsAtOnce(),
        "control": Steered(),
    }
    monitor = HangMonitor(
        context(folder, clock=clock, emit=emitted.append, **{**defaults, **given})
    )
    # This process's pid: a process that uses CPU time does not count as silent.
    monitor.on_launch(Launch(("miner",), os.getpid(), 0, clock.monotonic()))
    return monitor, clock, emitted


RUNNING = replace(STARTING, state="running", total_steps=15)


def idle(monitor: HangMonitor, clock: FakeClock, ranks: Mapping[int, Now], seconds: int) -> None:
    for _ in range(seconds):
        clock.advance(1.0)
        monitor.on_tick(clock.monotonic(), ranks)


@pytest.mark.parametrize("printing", [True, False])
def test_lines_that_are_not_understood_are_not_a_hang_but_silence_is(
    tmp_path: Path, printing: bool
) -> None:
    """A healthy miner that prints lines in an unknown format would be stopped every half hour."""
    config = replace(Config(), hang=HANG, miner=MinerSettings(attach="log"))
    monitor, clock, emitted = hang_watch(tmp_path, config=config)
    for _ in range(300):
        if printing:
            monitor.on_output(b"outer 1 inner 3 loss 2.5\n")
        idle(monitor, clock, {0: STARTING}, 1)
    assert [event.name for event in emitted][:1] == ([] if printing else ["hang_detected"])


def test_a_client_that_stays_in_a_state_is_told_what_its_users_found_to_help(
    tmp_path: Path,
) -> None:
    """Its heartbeats succeed all the while. The guard makes no restart: it would cost the place."""
    config = replace(Config(), miner=MinerSettings(profile="iota", attach="log"))
    config = replace(config, hang=replace(HANG, phases={"initializing": 60.0}, action="warn"))
    monitor, clock, emitted = hang_watch(tmp_path, config=config)
    since = clock.monotonic()
    for _ in range(90):
        clock.advance(1.0)
        state = replace(STARTING, state="running", phase="initializing", phase_since=since)
        monitor.on_output(b"heartbeat succeeded, status='initializing'\n")
        monitor.on_tick(clock.monotonic(), {0: state})
    (hang,) = [e for e in emitted if e.name == "hang_detected"]
    assert "in initializing for " in hang.text
    assert "a restart begins the wait again (issue 199)" in hang.fields["advice"] in hang.text
    assert monitor.context.control.asked == []  # type: ignore[attr-defined]


def test_ranks_that_have_lost_their_common_answer_are_ended_even_if_they_keep_stepping(
    tmp_path: Path,
) -> None:
    jobs, control = JobsLater(), Steered()
    monitor, clock, emitted = hang_watch(tmp_path, jobs=jobs, control=control)
    waiting = replace(
        STARTING, state="running", phase="collective", phase_since=clock.monotonic() - 60.0
    )
    monitor.on_tick(clock.monotonic(), {0: waiting, 1: replace(waiting, phase="data")})
    late = event(
        "guard_degraded",
        "warning",
        "GUARD DEGRADED: a rank did not ask in time",
        rank=0,
        what="a rank did not ask in time",
        where=LATE,
    )
    monitor.on_event(late)
    monitor.on_event(late)
    monitor.on_steps(0, [])
    (work,) = jobs.waiting
    work()
    hang = emitted[0]
    assert hang.fields["culprits"] == [1]
    assert control.asked == [("restart", f"hang: {hang.fields['detail']}")]


def test_no_hang_is_reported_while_the_miner_is_being_stopped(tmp_path: Path) -> None:
    """Ranks waiting for peers that a stop has already ended must not cause HANG DETECTED and an
    alert at night."""
    jobs, control = JobsLater(), Steered()
    monitor, clock, emitted = hang_watch(tmp_path, jobs=jobs, control=control)
    monitor.on_steps(0, [])
    idle(monitor, clock, {0: RUNNING}, 70)
    assert jobs.waiting, "it hangs, and its stacks are being gathered when the stop comes"
    monitor.on_event(
        event(
            "miner_stopping",
            "info",
            "MINER STOPPING: SIGTERM, 45s to stop",
            reason="SIGTERM",
            grace_s=45.0,
        )
    )
    for work in jobs.waiting:
        work()
    idle(monitor, clock, {0: RUNNING}, 300)
    assert not [f for f in emitted if f.name == "hang_detected"]
    assert len(jobs.waiting) == 1
    assert not control.asked


def test_the_ranks_of_an_ended_launch_are_no_longer_watched(tmp_path: Path) -> None:
    """The flight records of the last launch must not make a paused miner look hung."""
    monitor, clock, emitted = hang_watch(tmp_path)
    monitor.on_exit(Exit(1, None, False, False, 60.0))
    idle(monitor, clock, {0: RUNNING}, 300)
    assert not emitted


def test_a_finished_miner_that_does_not_exit_is_ended_as_finished(tmp_path: Path) -> None:
    """Otherwise a finished training run would start from scratch again and again."""
    control = Steered()
    monitor, clock, emitted = hang_watch(tmp_path, control=control)
    done = replace(RUNNING, state="finished", heartbeat=clock.monotonic())
    idle(monitor, clock, {0: done}, 400)
    assert [f.name for f in emitted].count("hang_detected") == 1
    ((verb, cause),) = control.asked
    assert verb == "finish"
    assert "the miner's process is still running" in cause
