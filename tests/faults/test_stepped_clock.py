"""The wall clock of the whole run jumps, as when a host reaches its time server; nothing waits for
it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from miner_guard.guard.control_socket import ask
from tests.faults.bar import library
from tests.faults.guarded import Guarded, until

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
SETTINGS = {"miner.stop_timeout_s": 3, "health.snapshot_every_s": 0.5}
TO_2000_S = -int(time.time()) + 946_684_800


@pytest.fixture
def step_clock(guarded: Guarded, tmp_path: Path) -> Callable[[int], None]:
    """Starts a guard and a miner whose clocks show the year 2000; later sets both to the present
    plus some seconds."""
    preload, clock = library("shifted_clock", tmp_path), tmp_path / "clock"
    if preload is None:
        pytest.skip("no C compiler")
    clock.write_text(str(TO_2000_S))
    env = {"LD_PRELOAD": str(preload), "SHIFTED_CLOCK_STATE": str(clock)}
    command = [sys.executable, "-u", "-c", f"{SLEEPER} # {guarded.token}"]
    guarded.start(command, settings=SETTINGS, env=env)
    guarded.wait_for("health_snapshot", 3)

    def step(seconds: int) -> None:
        # Write it in one go: a reader of half a number would see a third time.
        draft = clock.with_suffix(".draft")
        draft.write_text(str(seconds))
        os.replace(draft, clock)

    return step


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.parametrize("seconds", [0, -3600, 2_000_000_000])
def test_a_guard_whose_clock_jumps_keeps_its_schedule_and_honours_a_stop(
    guarded: Guarded, step_clock: Callable[[int], None], seconds: int
) -> None:
    """The schedule once enumerated every run missed since 2000: it hung, and had grown by 170 MB
    after 14 s."""
    pid = guarded.guard_pid
    before_mb, count = resident_mb(pid), len(guarded.named("health_snapshot"))
    step_clock(seconds)
    until(lambda: len(guarded.named("health_snapshot")) >= count + 10, 60, guarded.tail)
    years = {event["ts"][:4] for event in guarded.named("health_snapshot")}
    assert years == {"2000", time.strftime("%Y", time.gmtime(time.time() + seconds))}
    assert ask(guarded.state, {"do": "status"})["status"]["state"] == "running"
    assert resident_mb(pid) < before_mb + 20
    assert guarded.stop() == 0
    guarded.assert_nothing_left()
    assert not guarded.named("guard_killed")
