"""run.db survives damage, a full disk, a locked file and a kill; a reader never creates one and
never keeps the writer waiting."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from miner_guard.record import store as store_module
from miner_guard.record.events import Event
from miner_guard.record.status_document import read_document
from miner_guard.record.store import (
    CLEAR_NOW,
    LEDGER,
    Row,
    RunReader,
    RunStore,
    decision_row,
    event_row,
    now_row,
    upload_row,
)
from miner_guard.state_dir import StateDir, is_full


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "run.db"


@pytest.fixture
def events() -> list[Event]:
    """What the store reports."""
    return []


@pytest.fixture
def store(path: Path, events: list[Event]) -> RunStore:
    return RunStore(path, events.append)


def push(wall: float) -> Row:
    return upload_row(wall, "verified", tag="5.56.51", bytes=10)


def walls(path: Path) -> list[float]:
    return [row["wall"] for row in RunReader(path).rows("upload")]


def logged(number: int, name: str = "slow_step", level: str = "warning", **fields: Any) -> Row:
    record = {"ts": f"2026-01-02T03:04:{number:02d}.000000Z", "level": level, "event": name}
    rest = {"run_id": "r1", "host": "h", "rank": number % 2 or None}
    return event_row({**record, "msg": f"line {number}", **rest, **fields})


# --- reading ---


def test_events_come_back_as_the_log_has_them(path: Path) -> None:
    RunStore(path).write(*(logged(n, loss=float("nan"), path="x\ud800") for n in range(10)))
    (last,) = RunReader(path).events(limit=1, newest=True)
    assert last.record() == {
        "ts": "2026-01-02T03:04:09.000000Z",
        "level": "warning",
        "event": "slow_step",
        "msg": "line 9",
        "run_id": "r1",
        "host": "h",
        "rank": 1,
        "loss": None,
        "path": "x?",
    }
    assert RunReader(path).counts() == {"slow_step": 10}


@pytest.mark.parametrize(
    ("restrictions", "numbers"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"names": ["b"]}, [3, 4, 5]),
        ({"names": ["a", "b"], "limit": 2}, [0, 1]),
        ({"min_level": "error"}, [2, 5]),
        ({"since": "2026-01-02T03:04:04"}, [4, 5]),
        ({"ranks": [1], "newest": True, "limit": 2}, [3, 5]),
        ({"after": 4}, [4, 5]),
        ({"names": ["nothing"]}, []),
    ],
)
def test_a_query_restricts_events(
    path: Path, restrictions: Any, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_PAGE", 2)
    levels = ("info", "warning", "error")
    RunStore(path).write(*(logged(n, "ab"[n > 2], levels[n % 3]) for n in range(6)))
    events = RunReader(path).events(**restrictions)
    assert [int(event.text.split()[1]) for event in events] == numbers


def test_the_present_state_is_replaced_section_by_section(store: RunStore, path: Path) -> None:
    store.write(now_row("run", {"state": "running"}), now_row("steps", {"loss": 3.0}))
    store.write(now_row("steps", {"loss": float("inf")}))
    assert RunReader(path).now() == {"state": "running", "steps": {"loss": None}}
    store.write(CLEAR_NOW)
    assert RunReader(path).now() == {}


def test_a_state_that_is_replaced_while_it_is_read_is_still_json(
    store: RunStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its age was infinite, and the page answered 500 while a guard took over."""
    store.write(now_row("run", {"state": "running"}))
    ask = RunReader._ask

    def ask_and_clear(reader: RunReader, query: str, values: Sequence[Any]) -> list[Any]:
        rows = ask(reader, query, values)
        store.write(CLEAR_NOW)
        return list(rows)

    monkeypatch.setattr(RunReader, "_ask", ask_and_clear)
    document = read_document(StateDir(path.parent))
    assert json.loads(json.dumps(document, allow_nan=False))["state"] == "running"
    assert RunReader(path).now() == {}, "it was replaced meanwhile"


def test_a_reader_creates_nothing_and_says_why_it_read_nothing(path: Path) -> None:
    reader = RunReader(path)
    assert (reader.events(), reader.now(), reader.rows("upload")) == ([], {}, [])
    assert not path.exists()
    with pytest.raises(ValueError, match="no table"):
        reader.rows("secrets")
    path.parent.mkdir()
    path.write_bytes(b"this is no database" * 500)
    assert reader.events() == []
    assert reader.unread == "file is not a database"


# --- writing ---


def test_a_damaged_file_is_set_aside_and_a_new_one_begun(
    store: RunStore, path: Path, events: list[Event]
) -> None:
    path.parent.mkdir()
    path.write_bytes(b"this is no database" * 500)
    store.write(push(1.0))
    assert [event.name for event in events] == ["guard_degraded"]
    assert walls(path) == [1.0]
    store.close()
    data = bytearray(path.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    path.write_bytes(data)
    store.write(push(2.0))
    assert walls(path) == [2.0]
    assert len(list(path.parent.glob("*.damaged-*"))) == 2


def test_a_full_disk_takes_the_present_state_and_nothing_else(
    store: RunStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There were once hundreds of alarms a minute: a large row did not fit, but a small one did."""
    store.write(push(1.0))
    room = False
    monkeypatch.setattr(store_module, "has_room", lambda _where: room)
    whole = store._write_all

    def full(*_arguments: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store, "_write_all", full)
    for number in range(2, 5):
        with pytest.raises(OSError, match=r"disk is full|No space left") as raised:
            store.write(push(number), now_row("run", {"state": f"running {number}"}))
        monkeypatch.setattr(store, "_write_all", whole)
        assert is_full(raised.value)
        now = RunReader(path).now()
        assert now == {"state": f"running {number}"}, "readers learn that the guard lives"
    room = True
    store.write(push(6.0))
    assert walls(path) == [1.0, 6.0]


def test_a_file_that_another_process_holds_is_waited_for_once_a_write(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_HOLD_S", 0.05)
    store = RunStore(path)
    store.write(push(1.0))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    started = time.monotonic()
    with pytest.raises(OSError, match="database is locked") as raised:
        store.write(*(push(2.0 + number) for number in range(60)))
    assert time.monotonic() - started < 2, "one wait for the lock, not one a row"
    assert not is_full(raised.value)
    other.execute("COMMIT")
    other.close()
    store.write(push(2.0))
    assert walls(path) == [1.0, 2.0]


def test_a_row_that_sqlite_does_not_take_holds_back_none(
    store: RunStore, events: list[Event], path: Path
) -> None:
    for wall in (1.0, 2.0):
        store.write(upload_row(wall, "failed", bytes=10**20), push(wall))
    assert walls(path) == [1.0, 2.0]
    assert [event.name for event in events] == ["guard_degraded"]


def test_a_file_of_a_later_version_is_written_as_far_as_it_is_known(
    store: RunStore, events: list[Event], path: Path
) -> None:
    store.write(push(1.0))
    store.close()
    with sqlite3.connect(path) as db:
        for table in ("event", *LEDGER):
            db.execute(f"ALTER TABLE {table} ADD COLUMN later TEXT")
    store.write(push(2.0), logged(1))
    assert walls(path) == [1.0, 2.0]
    assert events == []


def test_neither_a_month_of_questions_nor_of_steps_fills_the_disk(
    store: RunStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"event": 40, "decision": 50, "upload": 60}
    monkeypatch.setattr(store_module, "MAX_ROWS", limits)
    monkeypatch.setattr(store_module, "_FORGET_EVERY", 20)
    for number in range(200):
        decided = {"decision_id": f"id-{number}", "decided_at": float(number)}
        store.write(decision_row(decided), logged(number % 60), push(number))
    reader = RunReader(path)
    rows = {"event": reader.events(), **{table: reader.rows(table) for table in LEDGER}}
    for table, limit in limits.items():
        assert limit <= len(rows[table]) <= limit + 20
    assert reader.rows("upload")[-1]["wall"] == 199.0


def test_a_file_that_somebody_removed_is_recreated(store: RunStore, path: Path) -> None:
    """Otherwise rows would be written to a deleted file, which would also continue to occupy the
    space that deleting it was meant to free."""
    store.write(push(1.0))
    path.unlink()
    store.write(push(2.0))
    assert walls(path) == [2.0]


def test_a_folder_that_cannot_be_made_is_an_error_of_the_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        RunStore(tmp_path / "file" / "run.db").write(push(1.0))


WRITING = """
import sys
import time
from pathlib import Path
from miner_guard.record.store import RunStore, upload_row
store = RunStore(Path(sys.argv[1]))
number = 0
while True:
    store.write(upload_row(float(number), "verified"))
    print(number, flush=True)
    number += 1
    time.sleep(0.01)
"""


def test_a_killed_writer_loses_nothing_that_it_confirmed(path: Path) -> None:
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", WRITING, str(path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            confirmed = [writer.stdout.readline() for _ in range(20)]
            before = len(walls(path))
            writer.send_signal(signal.SIGKILL)
        assert before >= len(confirmed)
        assert len(walls(path)) >= before
    reader = RunReader(path)
    assert reader.rows("upload", limit=1)
    assert reader.unread is None


TRUNCATING = """
import sys
from pathlib import Path
from miner_guard.record.store import RunReader, RunStore, upload_row
path = Path(sys.argv[1])
writer, reader = RunStore(path), RunReader(path)
for number in range(3):
    writer.write(upload_row(float(number), "verified"))
    reader.rows("upload")
    for beside in path.parent.iterdir():
        if beside != path:
            beside.write_bytes(b"")
print([row["wall"] for row in reader.rows("upload")])
"""


def test_truncating_the_files_beside_it_kills_no_process(path: Path) -> None:
    """Truncating a mapped -shm file killed its readers, the guard included, with SIGBUS."""
    run = subprocess.run(
        [sys.executable, "-c", TRUNCATING, str(path)], capture_output=True, text=True
    )
    assert (run.returncode, run.stdout) == (0, "[0.0, 1.0, 2.0]\n"), run.stderr
