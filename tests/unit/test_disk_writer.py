"""The guard's files are written in threads: nothing waits for the disk, and what it does not take
is counted."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from miner_guard import state_dir
from miner_guard.config import LogSettings
from miner_guard.guard import disk as writer_module
from miner_guard.guard.disk import STUCK_S, DiskWriter
from miner_guard.record.emitter import JsonlSink
from miner_guard.record.events import Event
from miner_guard.record.store import RunReader, repo_age_row
from miner_guard.state_dir import StateDir
from tests.support.waiting import until

LEDGER_ROW = {"reason": None, "age_s": 12.0}


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def writer(tmp_path: Path, events: list[Event]) -> Iterator[DiskWriter]:
    made = DiskWriter(StateDir(tmp_path / "state"), LogSettings(), events.append)
    yield made
    made.close(0.0)


def lines(folder: Path) -> list[int]:
    try:
        text = (folder / "state" / "guard.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line)["n"] for line in text.splitlines()]


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An unresponsive disk under guard.jsonl, until the event is set."""
    thawed, append = threading.Event(), JsonlSink.append

    def wait_and_append(sink: JsonlSink, line: str) -> None:
        thawed.wait(60)
        append(sink, line)

    monkeypatch.setattr(JsonlSink, "append", wait_and_append)
    yield thawed
    thawed.set()


def test_everything_is_written_in_order_before_the_end(writer: DiskWriter, tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    for n in range(300):
        writer.write({"n": n})
    writer.start()
    for n in range(300, 600):
        writer.write({"n": n})
        writer.replace(tmp_path / "some.json", f'{{"n": {n}}}'.encode(), 0o600)
    writer.row(*repo_age_row(1e9, 12.0))
    assert writer.close(30.0) == []
    assert lines(tmp_path) == list(range(600))
    assert json.loads((tmp_path / "some.json").read_text()) == {"n": 599}
    assert (tmp_path / "some.json").stat().st_mode & 0o777 == 0o600
    assert RunReader(state.db).rows("repo_age")[0]["age_s"] == 12.0


def test_a_file_can_be_removed_and_another_overwritten_in_its_place(
    writer: DiskWriter, tmp_path: Path
) -> None:
    """If the lock file were replaced, the holder of the old one would hold nothing."""
    gone, lock = tmp_path / "gone", tmp_path / "lock"
    gone.write_text("x")
    lock.write_text("a long content")
    inode = lock.stat().st_ino
    writer.start()
    writer.replace(gone, None, 0o600)
    writer.overwrite(lock, b"short")
    assert writer.close(30.0) == []
    assert not gone.exists()
    assert lock.read_text() == "short"
    assert lock.stat().st_ino == inode


def test_a_disk_that_does_not_answer_costs_memory_within_bounds_and_is_reported(
    writer: DiskWriter,
    tmp_path: Path,
    events: list[Event],
    frozen: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The log must neither stop the guard nor grow without bound; the drops are counted."""
    monkeypatch.setattr(writer_module, "STUCK_S", 0.2)
    monkeypatch.setattr(writer_module, "MAX_WAITING_BYTES", 64 * 1024)
    writer.start()
    begin = time.monotonic()
    for n in range(5000):
        writer.write({"n": n, "text": "x" * 80})
    assert time.monotonic() - begin < 5.0
    until(lambda: [event.name for event in events] == ["disk_stuck"], 30, "the report")
    assert events[0].fields["what"] == "guard.jsonl"
    assert writer._log.size < 80 * 1024
    frozen.set()
    until(lambda: [event.name for event in events][1:] == ["disk_recovered"], 30, "the end")
    assert writer.close(30.0) == []
    written = lines(tmp_path)
    assert written[-1] == 4999
    assert events[1].fields["lost"] == 5000 - len(written) > 0


@pytest.mark.usefixtures("frozen")
def test_an_end_does_not_wait_for_a_dead_disk(writer: DiskWriter) -> None:
    writer.start()
    writer.write({"n": 0})
    begin = time.monotonic()
    assert writer.close(0.3) == ["guard.jsonl"]
    assert time.monotonic() - begin < 5.0


def test_a_write_of_an_exit_handler_reaches_no_disk(writer: DiskWriter, tmp_path: Path) -> None:
    """The cost file is written at interpreter exit; on a frozen disk, the guard then hung, and not
    even SIGKILL could end it."""
    writer.start()
    writer.close(30.0)
    late: list[Exception] = []
    state_dir.divert_writes(writer.replace)
    try:
        thread = threading.Thread(target=_write, args=(tmp_path / "late", late))
        thread.start()
        thread.join(STUCK_S / 2)
        assert not thread.is_alive()
        _write(tmp_path / "late", late)
    finally:
        state_dir.divert_writes(None)
    assert not late
    assert not (tmp_path / "late").exists()


def _write(path: Path, errors: list[Exception]) -> None:
    try:
        state_dir.write_json(path, {})
    except OSError as error:
        errors.append(error)


def test_the_thread_of_a_job_learns_that_its_file_was_not_written(
    writer: DiskWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise evidence could be reported as stored although it is missing. The main thread never
    waits."""
    monkeypatch.setattr(writer_module, "STUCK_S", 0.2)
    errors: list[OSError] = []

    def job() -> None:
        try:
            writer.replace(tmp_path / "evidence", b"x", 0o600)
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=job)
    thread.start()
    thread.join(30)
    assert isinstance(errors[0], TimeoutError)
    writer.replace(tmp_path / "some.json", b"{}", 0o600)


def test_a_file_that_could_not_be_written_is_there_once_it_can(
    writer: DiskWriter, tmp_path: Path, events: list[Event]
) -> None:
    """Otherwise gate-inputs.json would stay as it was before the disk was full."""
    folder = tmp_path / "folder"
    folder.write_text("in the way")
    writer.start()
    for n in range(3):
        writer.replace(folder / "some.json", b"%d" % n, 0o600)
    until(lambda: events, 30, "the report")
    folder.unlink()
    until(lambda: (folder / "some.json").exists(), 30, "the file")
    assert (folder / "some.json").read_bytes() == b"2"
    until(lambda: len(events) == 2, 30, "the recovery")
    assert [event.name for event in events] == ["guard_degraded", "disk_recovered"]


def test_a_locked_ledger_holds_up_no_line_of_the_log(writer: DiskWriter, tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    writer.start()
    writer.row(*repo_age_row(1e9, 1.0))
    until(lambda: RunReader(state.db).rows("repo_age"), 30, "the first row")
    held = sqlite3.connect(state.db)
    held.execute("BEGIN EXCLUSIVE")
    writer.row(*repo_age_row(1e9, 2.0))
    writer.write({"n": 1})
    until(lambda: lines(tmp_path) == [1], 30, "the line")
    held.rollback()
    held.close()
    until(lambda: len(RunReader(state.db).rows("repo_age")) == 2, 30, "the second row")
