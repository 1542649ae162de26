"""A thread writes the guard's files: nothing waits for the disk, nothing is lost while it is full,
and what is dropped is counted."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miner_guard import state_dir
from miner_guard.config import LogSettings
from miner_guard.guard import disk as writer_module
from miner_guard.guard.disk import DiskWriter
from miner_guard.record.emitter import JsonlFile
from miner_guard.record.events import Event
from miner_guard.record.store import RunReader, RunStore, event_row, now_row, section_of, upload_row
from miner_guard.state_dir import StateDir
from tests.support.waiting import until


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def writer(tmp_path: Path, events: list[Event]) -> Iterator[DiskWriter]:
    """A writer whose own events go through its log, as the guard's do."""

    def report(event: Event) -> None:
        events.append(event)
        made.write({"event": event.name, **event.fields})

    made = DiskWriter(StateDir(tmp_path / "state"), LogSettings(), report)
    yield made
    made.close(0.0)


def records(folder: Path) -> list[dict[str, Any]]:
    try:
        text = (folder / "state" / "guard.jsonl").read_text()
    except FileNotFoundError:
        return []
    # The last line may be half written.
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def numbers(folder: Path) -> list[int]:
    return [record["n"] for record in records(folder) if "n" in record]


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An unresponsive disk under guard.jsonl, until the event is set."""
    thawed, append = threading.Event(), JsonlFile.append

    def wait_and_append(file: JsonlFile, line: str) -> None:
        thawed.wait(60)
        append(file, line)

    monkeypatch.setattr(JsonlFile, "append", wait_and_append)
    yield thawed
    thawed.set()


def test_everything_is_written_in_order_before_the_end(writer: DiskWriter, tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    (tmp_path / "gone").write_text("x")
    for n in range(300):
        writer.write({"n": n})
    writer.start()
    for n in range(300, 600):
        writer.write({"n": n})
        writer.replace(tmp_path / "some.json", f'{{"n": {n}}}'.encode(), 0o600)
    writer.replace(tmp_path / "gone", None, 0o600)
    writer.row(*upload_row(12.0, "verified"))
    assert writer.close(30.0) == []
    assert numbers(tmp_path) == list(range(600))
    assert json.loads((tmp_path / "some.json").read_text()) == {"n": 599}
    assert (tmp_path / "some.json").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "gone").exists()
    assert RunReader(state.db).rows("upload")[0]["wall"] == 12.0


def test_a_short_write_is_neither_a_full_disk_nor_a_lost_line(
    writer: DiskWriter, tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """56 of 60 step lines were once lost to a false DISK FULL."""
    write, short = os.write, [0]

    def some(fd: int, data: bytes) -> int:
        short[0] += len(data) > 7
        return write(fd, bytes(data)[:7])

    monkeypatch.setattr("miner_guard.record.emitter.os.write", some)
    writer.start()
    for n in range(60):
        writer.write({"n": n, "text": "x" * 50})
    until(lambda: len(numbers(tmp_path)) == 60, 30, "the lines")
    assert short[0] > 60
    assert events == []


@pytest.mark.parametrize("every", [1, 2], ids=["each write fails", "every second one"])
def test_lines_wait_while_the_disk_is_full_and_its_trouble_is_told_once(
    writer: DiskWriter,
    tmp_path: Path,
    events: list[Event],
    monkeypatch: pytest.MonkeyPatch,
    every: int,
) -> None:
    """3,353 events about the log once went through the log, for 60 steps."""
    monkeypatch.setattr(writer_module, "_RETRY_S", 0.02)
    write, calls, full = os.write, [0], [True]

    def fail(fd: int, data: bytes) -> int:
        calls[0] += 1
        if full[0] and calls[0] % every == 0:
            write(fd, bytes(data)[:3])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr("miner_guard.record.emitter.os.write", fail)
    writer.start()
    for n in range(60):
        writer.write({"n": n})
    until(lambda: calls[0] > 20, 30, "the attempts")
    full[0] = False
    until(lambda: len(numbers(tmp_path)) == 60, 30, "the lines")
    until(lambda: events[-1].level == "info", 30, "the end of the outage")
    assert numbers(tmp_path) == list(range(60))
    assert {event.name for event in events} == {"disk_full"}
    assert events[-1].fields["lost"] == 0
    assert "file" not in {name for record in records(tmp_path) for name in record}
    if every == 1:
        assert len(events) == 2


def test_the_end_of_an_outage_says_how_many_lines_found_no_room_to_wait(
    writer: DiskWriter, tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_RETRY_S", 0.02)
    monkeypatch.setattr(writer_module, "MAX_WAITING_BYTES", 64 * 1024)
    write, full = os.write, threading.Event()
    full.set()

    def fail(fd: int, data: bytes) -> int:
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr("miner_guard.record.emitter.os.write", fail)
    writer.start()
    for n in range(5000):
        writer.write({"n": n, "text": "x" * 80})
    until(lambda: events, 30, "the outage")
    full.clear()
    until(lambda: writer.settle(0.1) == [], 30, "the lines")
    until(lambda: events[-1].level == "info", 30, "the end of the outage")
    lost = 5000 - len(numbers(tmp_path))
    assert lost > 0
    assert [event.name for event in events[:2]] == ["disk_full", "disk_full"]
    assert events[1].fields["lost"] > 0
    assert f"{events[1].fields['lost']} lines lost" in events[1].text
    # The event of the recovery needs room, too: it may push out one line more.
    assert sum(event.fields["lost"] for event in events[1:]) == lost


def test_what_waits_for_the_disk_takes_no_more_memory_than_it_may(
    writer: DiskWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 MiB of text took 20 MB: the guard of a full disk grew from 65 to 85 MB."""
    monkeypatch.setattr(writer_module, "MAX_WAITING_BYTES", 1 << 20)
    common = {"level": "info", "event": "inner_step"}
    tracemalloc.start()
    try:
        for n in range(10_000):
            ts, msg = f"2026-01-02T03:04:05.{n:06}Z", f"Inner Step: {n} | Loss: 3.40"
            record = {"ts": ts, **common, "msg": msg, "n": n, "loss": n / 7}
            writer.write(record)
            writer.row(*event_row(record))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.5 < used / (1 << 20) < 1.1


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
    until(lambda: writer.check() or [event.name for event in events] == ["disk_stuck"], 30, "it")
    assert events[0].fields["what"] == "guard.jsonl"
    assert writer.settle(0.1) == ["guard.jsonl"], "an end does not wait for it either"
    frozen.set()
    until(lambda: [event.level for event in events][1:] == ["info"], 30, "the end")
    assert writer.close(30.0) == []
    written = numbers(tmp_path)
    assert written[-1] == 4999
    assert events[1].fields["lost"] == 5000 - len(written) > 0


def test_a_write_of_an_exit_handler_reaches_no_disk(writer: DiskWriter, tmp_path: Path) -> None:
    """The cost file is written at interpreter exit; on a frozen disk, the guard then hung, and not
    even SIGKILL could end it."""
    writer.start()
    writer.close(30.0)
    state_dir.divert_writes(writer.replace)
    try:
        state_dir.write_json(tmp_path / "late", {})
    finally:
        state_dir.divert_writes(None)
    assert not (tmp_path / "late").exists()


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

    for expected in ([TimeoutError], []):
        errors.clear()
        thread = threading.Thread(target=job)
        thread.start()
        thread.join(30)
        assert [type(error) for error in errors] == expected
        if expected:
            writer.replace(tmp_path / "some.json", b"{}", 0o600)
            monkeypatch.setattr(writer_module, "STUCK_S", 10.0)
            writer.start()
    assert (tmp_path / "evidence").read_bytes() == b"x"


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
    assert [event.level for event in events] == ["warning", "info"]


@pytest.mark.parametrize("full", [True, False])
def test_rows_wait_for_a_file_that_takes_none(
    writer: DiskWriter,
    tmp_path: Path,
    events: list[Event],
    monkeypatch: pytest.MonkeyPatch,
    full: bool,
) -> None:
    monkeypatch.setattr(writer_module, "_RETRY_S", 0.02)
    refused, write = [0], RunStore.write

    def refuse(_store: RunStore, *_rows: object) -> None:
        refused[0] += 1
        raise OSError(errno.ENOSPC if full else errno.EIO, "database or disk is in trouble")

    monkeypatch.setattr(RunStore, "write", refuse)
    writer.start()
    for n in range(50):
        writer.row(*upload_row(float(n), "verified"))
        writer.row(*now_row("run", {"n": n}))
    until(lambda: refused[0] > 5, 30, "the attempts")
    assert "run.db" in writer.settle(0.1)
    until(lambda: sum(section_of(row) == "run" for row, _ in writer._rows) == 1, 30, "the latest")
    monkeypatch.setattr(RunStore, "write", write)
    until(lambda: len(events) == 2, 30, "the recovery")
    assert writer.close(30.0) == []
    reader = RunReader(tmp_path / "state" / "run.db")
    assert [row["wall"] for row in reader.rows("upload")] == [float(n) for n in range(50)]
    assert reader.now() == {"n": 49}
    name = "disk_full" if full else "guard_degraded"
    assert [(event.name, event.level) for event in events] == [
        (name, "critical" if full else "warning"),
        (name, "info"),
    ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_is_replaced_and_reported(
    writer: DiskWriter, tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    append = JsonlFile.append

    def die(file: JsonlFile, line: str) -> None:
        monkeypatch.setattr(JsonlFile, "append", append)
        raise SystemExit

    monkeypatch.setattr(JsonlFile, "append", die)
    writer.start()
    thread = writer._thread
    assert thread is not None
    writer.write({"n": 0})
    thread.join(10)
    writer.check()
    writer.write({"n": 1})
    until(lambda: numbers(tmp_path)[-1:] == [1], 30, "the line")
    assert [event.name for event in events] == ["guard_degraded"]
