"""The ledger of decisions and uploads survives damage and a full disk, and a reader never creates
one."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from miner_guard.eventlog.catalog import Finding, message
from miner_guard.uploads.ledger import Ledger
from miner_guard.uploads.ledger_readers import ReadOnlyLedger
from miner_guard.uploads.ledger_schema import TABLES


def test_a_damaged_ledger_is_set_aside_and_a_new_one_begun(tmp_path: Path) -> None:
    path, findings = tmp_path / "ledger.sqlite3", list[Finding]()
    path.write_bytes(b"this is no database" * 500)
    ledger = Ledger(path, findings.append)
    ledger.restart(1.0, "crash", 1, 2.0)
    assert [f.event for f in findings] == ["file_set_aside"]
    assert len(ledger.rows("restarts")) == 1
    ledger.close()
    data = bytearray(path.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    path.write_bytes(data)
    for leftover in tmp_path.glob("ledger.sqlite3-*"):
        leftover.unlink()
    ledger.restart(2.0, "crash", 2, 4.0)
    ledger.incident(2.0, "nccl", cause="a cause", fix="a fix", excerpt="an excerpt", rank=3)
    assert ledger.rows("incidents")[-1]["label"] == "nccl"
    assert len(list(tmp_path.glob("*.damaged-*"))) == 2


def test_a_full_disk_loses_rows_and_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = list[Finding]()
    ledger = Ledger(tmp_path / "ledger.sqlite3", findings.append)
    ledger.restart(1.0, "crash", 1, 2.0)
    whole = ledger._done

    def full(_work: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(ledger, "_done", full)
    for _ in range(3):
        ledger.restart(2.0, "crash", 2, 4.0)
    monkeypatch.setattr(ledger, "_done", whole)
    ledger.restart(3.0, "crash", 3, 4.0)
    assert [message(f) for f in findings] == [
        (
            "DISK FULL: cannot write ledger.sqlite3 (database or disk is full); the "
            "miner keeps running"
        ),
        "DISK RECOVERED: writing ledger.sqlite3 again, 3 lines lost",
    ]
    assert [row["wall"] for row in ledger.rows("restarts")] == [1.0, 3.0]


def test_rows_wait_while_another_process_holds_the_file_and_block_no_caller(tmp_path: Path) -> None:
    """The ledger must not mistake a lock for a full disk, lose rows because of it, or stop the
    supervisor for 2 s per row."""
    findings, now = list[Finding](), 0.0
    ledger = Ledger(tmp_path / "ledger.sqlite3", findings.append, lambda: now)
    ledger.restart(1.0, "crash", 1, 2.0)
    other = sqlite3.connect(ledger.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    started = time.monotonic()
    for number in range(100):
        ledger.restart(2.0 + number, "crash", 2, 4.0)
    assert time.monotonic() - started < 60, (
        "a tenth of a second is meant; for each row it would be 200 s"
    )
    other.execute("COMMIT")
    other.close()
    now += 10.0
    ledger.restart(200.0, "crash", 3, 4.0)
    assert [message(f) for f in findings] == [
        "LEDGER STUCK: ledger.sqlite3: database is locked; the miner keeps running",
        "LEDGER RECOVERED: writing ledger.sqlite3 again, 0 rows lost",
    ]
    assert [row["wall"] for row in ledger.rows("restarts")] == [
        1.0,
        *(2.0 + n for n in range(100)),
        200.0,
    ]
    ledger.close()


def test_rows_that_wait_at_the_end_are_written_or_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = list[Finding]()
    monkeypatch.setattr("miner_guard.uploads.ledger._MAX_WAITING", 3)
    ledger = Ledger(tmp_path / "ledger.sqlite3", findings.append, lambda: 0.0)
    for last in (False, True):
        ledger.restart(1.0, "crash", 1, 2.0)
        other = sqlite3.connect(ledger.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        for number in range(5):
            ledger.restart(2.0 + number, "crash", 2, 4.0)
        if not last:
            other.execute("COMMIT")
        ledger.close()
        other.close()
        ledger._retry_at = 0.0
    assert [finding.event for finding in findings] == [
        "ledger_stuck",
        "ledger_recovered",
        "ledger_stuck",
        "ledger_stuck",
    ]
    assert findings[1].fields["lost"] == 2
    assert "3 rows could not be written" in message(findings[-1])


def test_a_row_that_sqlite_does_not_take_holds_back_none(tmp_path: Path) -> None:
    findings, now = list[Finding](), 0.0
    ledger = Ledger(tmp_path / "ledger.sqlite3", findings.append, lambda: now)
    ledger.restart(1.0, {"no": "text"}, 1, 2.0)  # type: ignore[arg-type]
    now += 10.0
    ledger.restart(2.0, "crash", 1, 2.0)
    assert [finding.event for finding in findings] == ["ledger_stuck", "ledger_recovered"]
    assert [row["wall"] for row in ledger.rows("restarts")] == [2.0]
    ledger.close()


def test_a_ledger_of_a_later_version_is_written_as_far_as_it_is_known(tmp_path: Path) -> None:
    """A downgraded guard once stopped writing rows because a table had one more column."""
    path, findings = tmp_path / "ledger.sqlite3", list[Finding]()
    ledger = Ledger(path, findings.append)
    ledger.restart(1.0, "crash", 1, 2.0)
    ledger.close()
    with sqlite3.connect(path) as db:
        for table in TABLES:
            db.execute(f"ALTER TABLE {table} ADD COLUMN later TEXT")
        db.execute("PRAGMA user_version = 2")
    decision = {"decision_id": "d1", "decided_at": 5.0, "record": {"inputs": "i1"}}
    ledger.decision(decision, {"published": None})
    assert ledger.find_decision("d1") == ({**decision, "verdicts": []}, {"published": None})
    ledger.close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (2,)
    assert findings == []


def test_a_command_reads_a_running_guards_ledger_and_never_creates_one(tmp_path: Path) -> None:
    absent = ReadOnlyLedger(tmp_path / "ledger.sqlite3")
    assert absent.rows("uploads") == []
    assert not absent.path.exists()
    writer = Ledger(absent.path)
    writer.upload(5.0, "verified", tag="5.56.51", bytes=10)
    assert absent.last("uploads")["tag"] == "5.56.51"  # type: ignore[index]
    with pytest.raises(ValueError, match="no table"):
        absent.rows("secrets")


def test_a_reader_leaves_nothing_beside_the_file_of_a_guard_that_has_ended(tmp_path: Path) -> None:
    writer = Ledger(tmp_path / "ledger?of #1.sqlite3")
    writer.upload(5.0, "verified", tag="5.56.51", bytes=10)
    writer.close()
    reader = ReadOnlyLedger(writer.path)
    assert len(reader.rows("uploads")) == 1
    reader.close()
    assert [path.name for path in tmp_path.iterdir()] == [writer.path.name]


def _decide(ledger: Ledger, number: int, wall: float) -> None:
    record = {"inputs": f"digest-{number // 10}", "candidate": {"inner_step": number}}
    verdicts = [{"rule": "loss", "outcome": "pass"}]
    document = {
        "decision_id": f"id-{number}",
        "decided_at": wall,
        "allowed": True,
        "kind": "gradient",
    }
    ledger.decision(document | {"verdicts": verdicts, "record": record}, {"of": number // 10})


def test_a_miner_that_asks_at_every_step_does_not_fill_the_disk_in_a_month(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger was once cleaned only when it was opened: with 15 s steps it grew by 0.8 GB a
    month."""
    monkeypatch.setattr("miner_guard.uploads.ledger.MAX_DECISIONS", 50)
    monkeypatch.setattr("miner_guard.uploads.ledger._FORGET_EVERY", 20)
    ledger = Ledger(tmp_path / "ledger.sqlite3")
    for number in range(200):
        _decide(ledger, number, 1e9 + number * 86400 / 4)
    assert len(ledger.rows("decisions")) <= 70
    assert len(ledger.rows("inputs")) <= 8
    stored = ledger.find_decision("id-199")
    assert stored is not None
    assert stored[0]["record"]["candidate"] == {"inner_step": 199}
    assert stored[0]["verdicts"] == [{"rule": "loss", "outcome": "pass"}]
    assert stored[1] == {"of": 19}
    assert ledger.rows("decisions")[-1]["document"].count("inner_step") == 0
    ledger.close()


def test_a_clock_that_was_wrong_for_a_while_costs_no_history(tmp_path: Path) -> None:
    """One row dated 2039 must not make all others look older than 90 days."""
    ledger = Ledger(tmp_path / "ledger.sqlite3")
    for number in range(200):
        ledger.restart(1e9 + number, "crash", 1, 2.0)
    ledger.restart(2.2e9, "crash", 1, 2.0)
    ledger.close()
    assert len(ledger.rows("restarts")) == 201
    ledger.close()


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        ledger = Ledger(tmp_path / "ledger.sqlite3")
        ledger.restart(1.0, "crash", 1, 2.0)
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        ledger.close()
    finally:
        os.umask(before)
    assert modes == {"ledger.sqlite3": 0o600}


def test_a_row_that_still_fits_on_a_full_disk_does_not_end_the_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There were once hundreds of alarms a minute: a decision did not fit, but its inputs did."""
    findings = list[Finding]()
    ledger = Ledger(tmp_path / "ledger.sqlite3", findings.append)
    whole, room = ledger._done, False

    def full(work: Any) -> Any:
        if len(findings) == 0:
            raise sqlite3.OperationalError("database or disk is full")
        return whole(work)

    monkeypatch.setattr(ledger, "_done", full)
    monkeypatch.setattr("miner_guard.uploads.ledger.has_room", lambda _where: room)
    for number in range(20):
        ledger.restart(float(number), "crash", 1, 2.0)
    assert [finding.event for finding in findings] == ["disk_full"]
    room = True
    ledger.restart(20.0, "crash", 1, 2.0)
    assert [finding.event for finding in findings] == ["disk_full", "disk_recovered"]
    assert findings[1].fields["lost"] == 20
    ledger.close()


def test_a_ledger_that_somebody_removed_is_recreated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise rows would be written to a deleted file, which would also continue to occupy the
    space that deleting it was meant to free."""
    path = tmp_path / "ledger.sqlite3"
    ledger = Ledger(path)
    for number in range(2):
        ledger.restart(1.0 + number, "crash", 1, 2.0)
        if number == 0:
            path.unlink()
            ledger._trouble = "full"
            monkeypatch.setattr(
                "miner_guard.uploads.ledger.has_room", lambda _where: ledger._connection is None
            )
    ledger.close()
    assert [row["wall"] for row in ReadOnlyLedger(path).rows("restarts")] == [2.0]


def test_a_folder_that_cannot_be_made_stops_nothing(tmp_path: Path) -> None:
    findings = list[Finding]()
    (tmp_path / "file").touch()
    ledger = Ledger(tmp_path / "file" / "ledger.sqlite3", findings.append)
    ledger.restart(1.0, "crash", 1, 2.0)
    ledger.close()
    assert [finding.event for finding in findings] == ["ledger_stuck", "ledger_stuck"]
    assert "1 row could not be written" in message(findings[1])


TRUNCATING = """
import sys
from pathlib import Path
from miner_guard.uploads.ledger import Ledger
from miner_guard.uploads.ledger_readers import RemoteLedger
path = Path(sys.argv[1])
writer, reader = Ledger(path), RemoteLedger(path, lambda statement, values: None)
for number in range(3):
    writer.restart(float(number), "crash", 1, 2.0)
    reader.rows("restarts")
    for beside in path.parent.iterdir():
        if beside != path:
            beside.write_bytes(b"")
print([row["wall"] for row in reader.rows("restarts")])
"""


def test_truncating_the_files_beside_the_ledger_kills_no_process(tmp_path: Path) -> None:
    """Truncating a mapped -shm file killed its readers, the guard included, with SIGBUS."""
    path = str(tmp_path / "ledger.sqlite3")
    run = subprocess.run([sys.executable, "-c", TRUNCATING, path], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "[0.0, 1.0, 2.0]\n"), run.stderr


def test_a_ledger_of_an_earlier_version_is_read_and_leaves_the_wal_mode(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    ledger = Ledger(path)
    ledger.restart(1.0, "crash", 1, 2.0)
    ledger.close()
    before = sqlite3.connect(path)
    before.execute("PRAGMA journal_mode = WAL")
    before.close()
    assert [row["wall"] for row in ReadOnlyLedger(path).rows("restarts")] == [1.0]
    ledger.restart(2.0, "crash", 1, 2.0)
    ledger.close()
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert [row["wall"] for row in ReadOnlyLedger(path).rows("restarts")] == [1.0, 2.0]
