"""The guard reports what a rank journals, and reports once that the newest checkpoint is old."""

from __future__ import annotations

from pathlib import Path

import pytest

from miner_guard.rank.journal import CheckpointEntry, EventEntry
from miner_guard.system.clock import FakeClock
from miner_guard.watch.base import Exit, Launch
from miner_guard.watch.checkpoints import ReportsMonitor
from tests.support.contexts import context

CLOCK_START = 1000.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(monotonic=CLOCK_START)


@pytest.fixture
def monitor(tmp_path: Path, clock: FakeClock) -> ReportsMonitor:
    return ReportsMonitor(context(tmp_path, clock=clock))


def checkpoint(step: int, complete: bool = True) -> CheckpointEntry:
    path = f"ckpt/step-{step}"
    return CheckpointEntry(path=path, step=step, seconds=0.5, size_bytes=1000, complete=complete)


def test_a_ranks_own_event_is_logged_with_its_rank(monitor: ReportsMonitor) -> None:
    text, fields = "CHECKPOINT RESUMED: a at step 20", {"path": "a", "step": 20}
    entry = EventEntry(event="checkpoint", level="info", text=text, rank=1, fields=fields)
    (event,) = monitor.on_entry(1, entry)
    assert (event.rank, event.text, event.fields) == (1, text, fields)


def test_an_event_with_a_reserved_field_is_reported_not_dropped(monitor: ReportsMonitor) -> None:
    odd = EventEntry(event="nonsense", level="info", text="x", fields={"run_id": "1"})
    (event,) = monitor.on_entry(0, odd)
    assert "nonsense" in event.text


def test_a_checkpoint_that_grows_old_is_reported_once(
    monitor: ReportsMonitor, clock: FakeClock
) -> None:
    (saved,) = monitor.on_entry(0, checkpoint(20))
    assert saved.text == "CHECKPOINT SAVED: ckpt/step-20 in 0.50s"
    assert not list(monitor.on_tick(CLOCK_START + 3600, {}))
    (stale,) = monitor.on_tick(CLOCK_START + 3601, {})
    assert "step 20) is 3601s old (limit 3600s)" in stale.text
    assert not list(monitor.on_tick(CLOCK_START + 9999, {}))
    clock.advance(9999)
    list(monitor.on_entry(0, checkpoint(40)))
    assert not list(monitor.on_tick(clock.monotonic() + 10, {}))


def test_a_crash_names_the_checkpoint_to_resume_from(
    monitor: ReportsMonitor, clock: FakeClock
) -> None:
    """Source 003: after an exception, the log says where the checkpoints are and advises
    resuming."""
    crashed = Exit(1, None, asked=False, finished=False, runtime_s=60.0)
    assert not list(monitor.on_exit(crashed))
    list(monitor.on_entry(0, checkpoint(20)))
    clock.advance(41)
    (kept,) = monitor.on_exit(crashed)
    assert kept.text == (
        "LAST CHECKPOINT: step 20, saved 41s before the end at ckpt/step-20; "
        "resume training from it"
    )
    assert not list(monitor.on_exit(Exit(0, None, asked=False, finished=True, runtime_s=60.0)))


@pytest.mark.parametrize(("finished", "told"), [(False, 1), (True, 0)])
def test_a_stop_says_that_the_snapshot_it_named_is_gone(
    monitor: ReportsMonitor, finished: bool, told: int
) -> None:
    """The last line named a file in /dev/shm that the guard removed a moment later."""
    file = monitor.context.state.memory / "step-00000151" / "rank-0000.pt"
    file.parent.mkdir(parents=True)
    file.touch()
    list(monitor.on_entry(0, checkpoint(150)))
    list(monitor.on_exit(Exit(143, 15, asked=True, finished=finished, runtime_s=60.0)))
    assert [event.text for event in monitor.on_stop()] == [
        "LAST CHECKPOINT: ckpt/step-150; the guard has stopped, so its snapshot in memory, of step "
        "151, is gone"
    ] * told
    assert not file.exists()


def test_a_miner_that_saves_every_two_hours_is_not_late_after_one(
    monitor: ReportsMonitor, clock: FakeClock
) -> None:
    list(monitor.on_entry(0, checkpoint(20)))
    clock.advance(7200)
    list(monitor.on_entry(0, checkpoint(40)))
    assert not list(monitor.on_tick(clock.monotonic() + 7200, {}))
    (stale,) = monitor.on_tick(clock.monotonic() + 3 * 3600 + 1, {})
    assert "(limit 10800s)" in stale.text


def test_a_restart_is_not_a_stale_checkpoint(monitor: ReportsMonitor) -> None:
    list(monitor.on_entry(0, checkpoint(20)))
    monitor.on_launch(Launch(("x",), 1, 1, CLOCK_START + 5000))
    assert not list(monitor.on_tick(CLOCK_START + 5001, {}))


def test_an_incomplete_one_is_reported(monitor: ReportsMonitor) -> None:
    (incomplete,) = monitor.on_entry(0, checkpoint(60, complete=False))
    assert "incomplete" in incomplete.text


def test_a_miner_without_checkpoints_is_never_called_stale(monitor: ReportsMonitor) -> None:
    assert not list(monitor.on_tick(CLOCK_START + 1e6, {}))
