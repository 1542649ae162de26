"""Today's guard and its commands can read an earlier version's state directory.

`tests/fixtures/state-24887bf.tar.xz` is what `miner-guard demo --steps 60 --fault crash@30:1` left
at commit 24887bf (0.1.0): a crash, a restart, two uploads, a finish.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import tarfile
from pathlib import Path

import pytest

from miner_guard.cli.main import run
from miner_guard.eventlog.catalog import CATALOGUE
from miner_guard.eventlog.query import Query, search
from miner_guard.flight_recorder.reader import FlightReader
from miner_guard.state_dir import StateDir
from tests.faults.guarded import Guarded
from tests.support import requires

FIXTURES = requires.REPO / "tests" / "fixtures"
FAST = {"miner.stop_timeout_s": 3, "health.sample_every_s": 600, "gpu.preflight": "false"}


def unpack(version: str, root: Path) -> StateDir:
    with tarfile.open(FIXTURES / f"state-{version}.tar.xz") as archive:
        archive.extractall(root, filter="data")
    return StateDir(root)


@pytest.fixture(params=["24887bf"])
def state(request: pytest.FixtureRequest, tmp_path: Path) -> StateDir:
    return unpack(request.param, tmp_path / "state")


def test_every_reading_command_understands_it(
    state: StateDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ["--state-dir", str(state.root)]
    assert run(["status", *here]) == 3
    assert "the last one:" in capsys.readouterr().err
    assert run(["logs", *here, "--event", "incident", "--json"]) == 0
    (incident,) = json.loads(capsys.readouterr().out)
    assert incident["label"] == "code_bug"
    assert run(["top", "--once", *here]) == 0
    shown = capsys.readouterr().out
    assert "restarts 1" in shown
    assert run(["report", *here, "-o", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "INCIDENT code_bug" in page
    assert run(["bundle", *here, "-o", str(tmp_path / "bundle.tar.gz")]) == 0
    capsys.readouterr()
    assert run(["costs", *here, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["operations"]["guard.hook"]["calls"] > 0
    for table, rows in (("decisions", 6), ("uploads", 2), ("restarts", 1), ("incidents", 1)):
        assert run(["logs", *here, "--ledger", table, "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)) == rows
    assert run(["explain", str(state.log)]) == 0


def test_earlier_decisions_are_judged_the_same_today(
    state: StateDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wording and checksums of the decisions may differ, but not their outcome."""
    with sqlite3.connect(state.ledger) as ledger:
        decisions = [name for (name,) in ledger.execute("SELECT id FROM decisions")]
    for decision in decisions:
        run(["gate", "--state-dir", str(state.root), "--replay", decision, "--json"])
        answer = json.loads(capsys.readouterr().out)
        assert answer["decision"]["allowed"] == answer["stored"]["allowed"]


def test_no_earlier_event_is_unknown_today(state: StateDir) -> None:
    events = {hit.event for hit in search(state.log, Query())}
    assert len(events) > 15
    assert events <= CATALOGUE.keys()


def test_the_flight_records_name_their_runs_end(state: StateDir) -> None:
    for rank in (0, 1):
        reader = FlightReader(state.flight_of(rank))
        assert reader.identity.pid
        assert reader.now().inner_step
        reader.close()


def test_todays_guard_continues_in_it(guarded: Guarded) -> None:
    state = unpack("24887bf", guarded.state.root)
    before = sum(1 for _ in search(state.log, Query()))
    guarded.start(guarded.miner("steps", 3, 0.01, "finish"), settings=FAST)
    assert guarded.processes[0].wait(60) == 0
    after = [hit.event for hit in search(state.log, Query())]
    assert len(after) > before
    assert after[before:].count("miner_finished") == 1
    assert not list(state.root.glob("*.damaged-*")), "nothing of then is taken for torn"
    guarded.assert_nothing_left()


def test_the_fixtures_hold_no_path_of_a_workplace() -> None:
    for path in FIXTURES.glob("state-*.tar.xz"):
        with tarfile.open(path) as archive:
            for member in archive.getmembers():
                file = archive.extractfile(member)
                text = b"" if file is None else file.read()
                assert b"/root/" not in text
                assert sys.prefix.encode() not in text, member.name
