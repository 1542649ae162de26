"""The ledger of decisions and uploads: survives damage and a full disk, and a reader makes none."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from miner_guard.events import Finding, line
from uploads.ledger import Ledger, ReadOnlyLedger


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
    ledger.incident(2.0, "nccl", "a cause", "a fix", "an excerpt", 3)
    assert ledger.rows("incidents")[-1]["label"] == "nccl"
    assert len(list(tmp_path.glob("*.damaged-*"))) == 2


def test_a_full_disk_costs_rows_and_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert [line(f) for f in findings] == [
        "DISK FULL: ledger.sqlite3 stopped writing (database or disk is full); the miner goes on",
        "DISK RECOVERED: ledger.sqlite3 writes again, 3 lines lost",
    ]
    assert [row["wall"] for row in ledger.rows("restarts")] == [1.0, 3.0]


def test_a_ledger_beside_a_running_guard_is_read_and_never_made(tmp_path: Path) -> None:
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
