"""The part that watches for hangs: a miner whose steps it can't see is said to be unseen, not
hanging."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from miner_guard.config import Config, HangSettings, MinerSettings
from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.flight_recorder.records import Now
from miner_guard.monitors.base import Launch
from miner_guard.monitors.hang import HangMonitor
from miner_guard.rank.consensus.agree import LATE
from miner_guard.system.clock import FakeClock
from tests.support.contexts import IdleControl, JobsNever, context

HANG = HangSettings(min_s=10.0, first_step_s=60.0)
STARTING = Now("starting", "", 0.0, 0.0, None, None, 0, None, None, None, None, 1, 0, 0, 0)


def watch(
    folder: Path,
    attach: Literal["sn38", "auto", "log"] | None,
    ranks: Mapping[int, Now],
    *,
    printing: bool,
) -> list[Finding]:
    """What is found in five minutes of a miner that shows no step."""
    clock = FakeClock()
    config = replace(Config(), hang=HANG, miner=MinerSettings(attach=attach))
    part = HangMonitor(context(folder, config=config, clock=clock, jobs=JobsNever()))
    part.on_launch(Launch(("miner",), 1, 0, clock.monotonic()))
    found: list[Finding] = []
    for _ in range(300):
        clock.advance(1.0)
        if printing:
            part.on_output(b"outer 1 inner 3 loss 2.5\n")
        found += part.on_tick(clock.monotonic(), ranks)
    return found


def test_lines_that_are_not_understood_are_no_hang(tmp_path: Path) -> None:
    """Guards against a healthy miner ended every half hour, since its lines are of a form that is
    not known."""
    (blind,) = watch(tmp_path, "log", {0: STARTING}, printing=True)
    assert blind.event == "guard_degraded"
    assert "describe them in [miner] log_patterns" in str(blind.fields["what"])


def test_a_program_known_by_its_lines_that_prints_nothing_hangs(tmp_path: Path) -> None:
    assert [f.event for f in watch(tmp_path, "log", {0: STARTING}, printing=False)] == [
        "hang_detected"
    ]


@pytest.mark.parametrize(
    ("attach", "advice"),
    [
        (None, "does not call the hook; start it with --attach"),
        ("sn38", "--attach auto or log"),
        ("auto", "--attach log"),
    ],
)
def test_a_miner_that_nothing_is_seen_of_is_said_once(
    tmp_path: Path, attach: Literal["sn38", "auto"] | None, advice: str
) -> None:
    """Guards against `HEALTH running` all night over a miner whose steps nobody watches."""
    (blind,) = watch(tmp_path, attach, {}, printing=True)
    assert blind.event == "guard_degraded"
    assert str(blind.fields["what"]).startswith("no step seen for 1 min")
    assert advice in str(blind.fields["what"])


class JobsLater(JobsNever):
    """Work waits until the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def once(self, name: str, work: Callable[[], None]) -> None:
        self.waiting.append(work)


class Restarts(IdleControl):
    """Keeps why a restart was asked for."""

    def __init__(self) -> None:
        self.causes: list[str] = []

    def restart(self, cause: str) -> None:
        self.causes.append(cause)


def test_ranks_that_have_lost_their_common_answer_are_ended_though_they_step_on(
    tmp_path: Path,
) -> None:
    clock, jobs, control = FakeClock(), JobsLater(), Restarts()
    part = HangMonitor(
        context(
            tmp_path, config=replace(Config(), hang=HANG), clock=clock, jobs=jobs, control=control
        )
    )
    part.on_launch(Launch(("miner",), 1, 0, clock.monotonic()))
    waiting = replace(
        STARTING, state="running", phase="collective", phase_since=clock.monotonic() - 60.0
    )
    part.on_tick(clock.monotonic(), {0: waiting, 1: replace(waiting, phase="data")})
    late = make_finding("guard_degraded", rank=0, what="a rank did not come in time", where=LATE)
    (hang,) = part.on_finding(late)
    assert hang.fields["culprits"] == [1]
    assert not list(part.on_finding(late)), "said once, though each rank that waited tells of it"
    part.on_steps(0, [])
    for work in jobs.waiting:
        work()
    assert control.causes == [f"hang: {hang.fields['detail']}"]
