"""What the guard sends or hands over (bundle, report, alert, OTLP) shows no part of a secret, even
if an event quotes a server that printed one and no deny-list knows its form."""

from __future__ import annotations

import math
import tarfile
from pathlib import Path
from typing import Any

import pytest

from miner_guard.config import AlertSettings, Config
from miner_guard.record.events import Event
from miner_guard.record.redaction import Redactor
from miner_guard.record.store import RunReader, StoredEvent
from miner_guard.show.alerts import AlertsMonitor
from miner_guard.show.bundle import Item, pack
from miner_guard.show.page import render
from tests.support import requires
from tests.support.contexts import context
from tests.support.guard_log import Log
from tests.unit.test_public_lines import FORMS, pieces_of_secrets

ERRORS = [f"the server said: {form}" for form in FORMS.values()]


@pytest.fixture(scope="module")
def pieces() -> list[str]:
    return list(pieces_of_secrets())


@pytest.fixture
def log(tmp_path: Path) -> Log:
    written = Log(tmp_path / "state")
    for error in ERRORS:
        written.say("upload_failed", reason=error)
    whole = "".join(event.text for event in stored(written))
    assert any(piece in whole for piece in pieces_of_secrets()), "the deny-list has gaps"
    return written


def stored(log: Log) -> list[StoredEvent]:
    return RunReader(log.state.db).events(["upload_failed"])


def test_the_bundle(log: Log, tmp_path: Path, pieces: list[str]) -> None:
    lines = "".join(f"{event.text}\n" for event in stored(log))
    pack(tmp_path / "b.tar.gz", [Item("events.jsonl", "events", lines)], Redactor())
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        (name,) = (name for name in archive.getnames() if name.endswith("events.jsonl"))
        member = archive.extractfile(name)
        assert member is not None
        text = member.read().decode()
    assert "the server said" in text
    assert [piece for piece in pieces if piece in text] == []


def test_the_report(log: Log, pieces: list[str]) -> None:
    page = render(log.state)
    assert "UPLOAD FAILED" in page
    assert [piece for piece in pieces if piece in page] == []


def test_an_alert(tmp_path: Path, pieces: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr("miner_guard.show.alerts.Target.put", lambda _self, a: sent.append(a))
    config = Config(alerts=AlertSettings(urls=("json://127.0.0.1:9/",), min_level="error"))
    monitor = AlertsMonitor(context(tmp_path, config=config))
    for number, error in enumerate(ERRORS):
        text = f"UPLOAD FAILED: {error}"
        list(monitor.on_event(Event("upload_failed", "error", text, {"what": f"{number}"})))
        monitor.on_tick(math.inf, {})
    assert len(sent) == len(ERRORS)
    whole = "\n".join(alert.title + alert.body for alert in sent)
    assert "UPLOAD FAILED: the server said" in whole
    assert [piece for piece in pieces if piece in whole] == []


def test_a_log_record_of_otlp(log: Log, pieces: list[str]) -> None:
    requires.module("opentelemetry.sdk")
    from miner_guard.show.otel import _log_record

    records = [_log_record(event) for event in stored(log)]
    text = "".join(f"{record.body} {record.attributes}\n" for record in records)
    assert "the server said" in text
    assert [piece for piece in pieces if piece in text] == []
