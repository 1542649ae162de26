"""The guard reports within two minutes that it sees no steps, with the line that most resembles
one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from miner_guard.config import Config, MinerSettings
from miner_guard.rank.layout import Now, StepRecord
from miner_guard.record.events import Event, event
from miner_guard.system.clock import FakeClock
from miner_guard.watch.base import Exit, Launch
from miner_guard.watch.output import FirstStepMonitor
from tests.support.contexts import context

Attach = Literal["sn38", "auto", "log"] | None
STARTING = Now("starting", "load_state", 0.0, 0.0, None, None, 0, None, None, None, None, 1)


class Miner:
    """A launch that prints what the test says."""

    def __init__(
        self, folder: Path, attach: Attach, ranks: Mapping[int, Now] | None = None
    ) -> None:
        self.clock = FakeClock()
        self.ranks = ranks or {}
        config = replace(Config(), miner=MinerSettings(attach=attach))
        self.monitor = FirstStepMonitor(context(folder, clock=self.clock, config=config))
        self.monitor.on_launch(Launch(("miner",), 1, 0, self.clock.monotonic()))

    def waits(self, seconds: int, line: str = "") -> list[Event]:
        found: list[Event] = []
        for _ in range(seconds):
            self.clock.advance(1.0)
            found += self.monitor.on_lines([line.encode()] if line else [])
            found += self.monitor.on_tick(self.clock.monotonic(), self.ranks)
        return found


def test_lines_not_understood_are_quoted_within_two_minutes(tmp_path: Path) -> None:
    """Otherwise the guard could miss half an hour of training without anybody noticing."""
    (event,) = Miner(tmp_path, "log").waits(120, "loss of outer 1 is 2.5 at 3")
    assert (event.name, event.level) == ("no_step_yet", "warning")
    detail = str(event.fields["detail"])
    assert "'loss of outer 1 is 2.5 at 3': it mentions a loss" in detail
    assert "explain --steps" in detail


@pytest.mark.parametrize(
    ("attach", "advice"),
    [
        (None, "no rank has called miner_guard.init()"),
        ("sn38", "--attach auto or log"),
        ("auto", "--attach log"),
    ],
)
def test_a_miner_that_prints_steps_which_no_hook_reports(
    tmp_path: Path, attach: Attach, advice: str
) -> None:
    """The guard must not report `HEALTH running` all night while it sees none of the miner's
    steps."""
    (event,) = Miner(tmp_path, attach).waits(600, "step 3: loss 2.5, time 10ms")
    detail = str(event.fields["detail"])
    assert event.level == "warning"
    assert "the miner prints steps, such as 'step 3: loss 2.5, time 10ms'" in detail
    assert advice in detail


def test_a_miner_that_still_loads_raises_no_warning(tmp_path: Path) -> None:
    quiet = Miner(tmp_path, "auto", {0: STARTING})
    (notice,) = quiet.waits(600, "Loading checkpoint shards: 1/3")
    assert notice.level is None or notice.level == "info"
    assert "rank 0 is in load_state" in str(notice.fields["detail"])
    (warning,) = quiet.waits(90, "step 3: loss 2.5")
    assert warning.level == "warning", "it trains now, and no step is seen"


def test_a_short_program_learns_why_no_step_was_seen(tmp_path: Path) -> None:
    miner = Miner(tmp_path, "auto")
    assert miner.waits(5, "loss of outer 1 is 2.5 at 3") == []
    (told,) = miner.monitor.on_exit(Exit(0, None, False, False, 5.0))
    assert told.text.startswith("NO STEP YET when the miner ended after 5s: ")
    assert "the nearest line is 'loss of outer 1" in told.text
    assert list(miner.monitor.on_exit(Exit(0, None, False, False, 5.0))) == []


@pytest.mark.parametrize("attach", [None, "sn38", "auto", "log"])
def test_after_half_an_hour_the_guard_says_that_it_is_blind(tmp_path: Path, attach: Attach) -> None:
    *_, blind = Miner(tmp_path, attach).waits(1900)
    assert blind.name == "guard_degraded"
    assert str(blind.fields["what"]).startswith("no step seen for 31 min")


def test_a_step_or_a_hang_ends_the_watch(tmp_path: Path) -> None:
    for end in ("step", "hang"):
        miner = Miner(tmp_path, "log")
        if end == "step":
            miner.monitor.on_steps(0, [StepRecord()])
        else:
            fields = {"detail": "…", "culprits": [], "idle_s": 1.0, "limit_s": 1.0}
            miner.monitor.on_event(event("hang_detected", "critical", "HANG DETECTED: …", **fields))
        assert miner.waits(2000, "loss of outer 1 is 2.5 at 3") == []
