"""A full disk stops the guard's writes, not the miner; the guard reports it once, and resumes when
there is room."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from miner_guard.record.status_document import StatusDocument
from miner_guard.record.store import RunReader, RunStore, decision_row, now_row, upload_row
from miner_guard.state_dir import StateDir, is_full
from tests.faults.guarded import Guarded, until
from tests.support.present_state import now_rows, status_of


@pytest.fixture(params=["size=2m"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB, or with another limit."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", str(place)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small file system can't be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


MINER = """
import os, sys, time
for n in range(10**6):
    print('line', n, flush=True)
    if n % 20 == 0 and os.path.exists(sys.argv[1]):
        print('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB', flush=True)
        os.unlink(sys.argv[1])
    time.sleep(0.05)
"""


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 512)


def test_a_full_disk_is_reported_once_and_writing_resumes(
    guarded: Guarded, small_disk: Path
) -> None:
    guarded.state = StateDir(small_disk / "state")
    oom = small_disk.parent / "oom"
    guarded.start(
        [sys.executable, "-c", f"{MINER} # {guarded.token}", str(oom)],
        settings={"restart.backoff_s": 0.1, "health.snapshot_every_s": 0.3},
    )
    guarded.wait_for("health_snapshot", 2)

    def counted(event: str) -> int:
        """How often the monitors have received an event, according to run.db."""
        status = StatusDocument.from_json(RunReader(guarded.state.db).now())
        return status.metrics.events.get(event, 0)

    ballast = small_disk / "ballast"
    fill(ballast)
    until(lambda: b"DISK FULL: " in guarded.output.read_bytes(), 60, guarded.tail)
    oom.touch()
    until(lambda: b"INCIDENT " in guarded.output.read_bytes(), 60, guarded.tail)
    lines = guarded.output.read_bytes().count(b"\nline ")
    until(
        lambda: guarded.output.read_bytes().count(b"\nline ") > lines + 20,
        60,
        "the miner keeps running",
    )
    printed = guarded.output.read_bytes()
    assert printed.count(b"DISK FULL: ") == 1, (
        "one cause, one line, from the first writer that failed"
    )
    assert b"can't be read: " not in printed
    until(lambda: counted("disk_full") > 0, 30, "run.db stays current on the full disk")
    assert b"No space left" not in printed.partition(b"DISK FULL: ")[2].partition(b"\n")[2]
    ballast.unlink()
    until(lambda: b"DISK RECOVERED: " in guarded.output.read_bytes(), 60, guarded.tail)
    until(lambda: status_of(guarded.state.root)["state"] == "running", 60, "run.db")
    until(lambda: counted("disk_full") > 1, 30, "the verdict hears of the recovery too")
    assert not guarded.named("miner_exited")
    assert guarded.stop() == 0
    assert guarded.output.read_bytes().count(b"HEALTH ") == len(guarded.named("health_snapshot")), (
        "every line was written once there was room"
    )


def test_a_full_disk_keeps_room_for_the_present_state_whatever_was_deleted_before(
    small_disk: Path,
) -> None:
    """A list of free pages in the file cost the journal one page more than the reserve had room
    for: the state stayed as it was, so readers took the guard for dead."""
    path = small_disk / "run.db"
    store = RunStore(path)
    store.write(now_row("run", {"state": "starting"}), now_row("steps", {"text": "x" * 90_000}))
    store.write(now_row("steps", {"text": "x" * 60_000}))
    fill(small_disk / "ballast")
    for number in range(3):
        now = {"steps": {"text": str(number) * 60_000}, "state": f"running {number}"}
        large = decision_row({"decision_id": str(number), "verdicts": ["x" * 300_000]})
        with pytest.raises(OSError, match=r"disk is full|No space left") as raised:
            store.write(large, *now_rows(now))
        assert is_full(raised.value)
        assert RunReader(path).now() == now
    store.close()


def test_rows_that_a_nearly_full_disk_took_are_not_refused(small_disk: Path) -> None:
    """They were in the file, but the reserve did not fit beside them: every retry of the write
    added them once more."""
    ballast, path = small_disk / "ballast", small_disk / "run.db"
    store = RunStore(path)
    store.write(now_row("run", {"state": "starting"}))
    fill(ballast)
    large = decision_row({"decision_id": "large", "verdicts": ["x" * 300_000]})
    with pytest.raises(OSError, match="disk is full"):
        store.write(large, now_row("steps", {"text": "x" * 100_000}))
    os.truncate(ballast, ballast.stat().st_size - 90 * 1024)
    store.write(upload_row(1.0, "verified", tag="5.56.51"))
    assert len(RunReader(path).rows("upload")) == 1
    store.close()


def test_a_guard_that_starts_on_a_full_disk_writes_its_present_state(small_disk: Path) -> None:
    """The present state had taken the room of the reserve, so the next guard could not open the
    file."""
    path = small_disk / "run.db"
    large = decision_row({"decision_id": "large", "verdicts": ["x" * 300_000]})
    store = RunStore(path)
    store.write(now_row("run", {"state": "starting"}))
    fill(small_disk / "ballast")
    for number in range(2):
        now = {"steps": {"text": str(number) * 70_000}, "state": f"running {number}"}
        with pytest.raises(OSError, match="disk is full"):
            store.write(large, *now_rows(now))
        assert RunReader(path).now() == now
        store.close()
        store = RunStore(path)


@pytest.mark.parametrize("small_disk", ["nr_inodes=4", "nr_inodes=6"], indirect=True)
def test_finished_work_is_not_run_again_where_no_file_can_be_made(
    guarded: Guarded, small_disk: Path
) -> None:
    """It was run seven times: a rank could say that it was done only through a new file."""
    guarded.state = StateDir(small_disk / "state")
    guarded.start(guarded.miner("steps", 5, 0.05, "finish"), settings={"restart.backoff_s": 0.1})
    assert guarded.processes[0].wait(60) == 0, guarded.tail()
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "another").touch()
    printed = guarded.output.read_text()
    assert printed.count("MINER STARTED") == printed.count("MINER FINISHED") == 1, printed
