"""`miner-guard gate`: exit codes, and one JSON document."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from miner_guard.cli.main import run
from miner_guard.config import GateSettings
from miner_guard.record.store import RunStore, decision_row, upload_row
from miner_guard.state_dir import StateDir
from miner_guard.uploads import gate
from miner_guard.uploads.gate import GateInputs, Watched, decide
from miner_guard.validators.facts import Candidate

Ask = Callable[..., int]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run(["gate", "--state-dir", str(tmp_path), *arguments])


def test_exit_codes_and_words(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("--outer-step", "56", "--inner-step", "15") == 1
    out = capsys.readouterr().out
    assert out.startswith(
        "UPLOAD BLOCKED: inner_step (15) < minimum (50). Validators will reject this!"
    )
    assert "unknown  repo_age" in out
    assert ask("--outer-step", "56", "--inner-step", "50") == 0
    assert ask("--outer-step", "56", "--inner-step", "0", "--kind", "archive") == 0
    assert ask("--outer-step", "56") == 64
    assert ask("--outer-step", "56", "--inner-step", "-1") == 64
    assert ask("--outer-step", "56", "--inner-step", "50", "--kind", "other") == 64


def test_json_is_the_whole_decision_and_nothing_else(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask("--outer-step", "56", "--inner-step", "15", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["allowed"], document["retry_after_steps"]) == (False, 35)
    assert ask("--outer-step", "56", "--inner-step", "60", "--loss", "nan", "--json") == 1
    json.loads(capsys.readouterr().out)


def test_the_profiles_limits_apply_without_a_running_guard(
    ask: Ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "guard.toml").write_text('[miner]\nprofile = "sn38"\n')
    (tmp_path / "config.json").write_text('{"block_list": []}')
    assert ask("--outer-step", "5", "--inner-step", "60", "--config-json", "config.json") == 1
    assert "block_list is empty" in capsys.readouterr().out
    assert ask("--outer-step", "5", "--inner-step", "60", "--revision", "5-60") == 1


def test_without_settings_here_the_guard_of_the_state_directory_decides(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the answer would come from the defaults in the terminal's folder, which no rank of
    the miner uses."""
    watched = Watched(gate=GateSettings(min_inner_step=30))
    gate.write(StateDir(tmp_path).gate_inputs, GateInputs(watched=watched))
    assert ask("--outer-step", "56", "--inner-step", "40") == 0
    assert f"using the one from the guard in {tmp_path}" in capsys.readouterr().err
    assert ask("--outer-step", "56", "--inner-step", "29") == 1
    monkeypatch.setenv("MINER_GUARD_GATE__MIN_INNER_STEP", "45")
    assert ask("--outer-step", "56", "--inner-step", "40") == 1


def test_without_a_guard_a_gate_question_leaves_nothing_behind(ask: Ask, tmp_path: Path) -> None:
    assert ask("--outer-step", "56", "--inner-step", "60") == 0
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_inspected_where_it_is_named(
    ask: Ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gradients.pt").write_bytes(b"")
    assert ask("--outer-step", "5", "--inner-step", "60", "--gradients", "gradients.pt") in (0, 1)
    out = capsys.readouterr().out
    assert "gradients.pt: the file is empty" in out or "torch cannot be imported" in out


def test_a_ledger_that_cannot_be_read_is_not_called_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.db").write_bytes(b"this is no database" * 500)
    assert run(["logs", "--ledger", "uploads", "--state-dir", str(tmp_path)]) == 1
    assert "cannot be read: file is not a database" in capsys.readouterr().err


def test_the_ledger_is_read_by_logs_and_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ["--state-dir", str(tmp_path)]
    decision = decide(
        Candidate("gradient", 56, 10), gate.unknown("none"), GateSettings(), now=1.0, wall=5.0
    )
    ledger = RunStore(tmp_path / "run.db")
    ledger.write(decision_row(decision.as_dict()))
    ledger.write(
        upload_row(6.0, "refuted", tag="5.56.51", bytes=1000, seconds=12.0, error="did not move")
    )
    ledger.write(
        upload_row(
            7.0, "verified", tag="5.56.60", bytes=1000, seconds=12.0, attempts=1, checksum="c" * 40
        )
    )
    ledger.close()
    assert run(["logs", *here, "--ledger", "decisions"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"1970-01-01T00:00:05.000000Z id={decision.decision_id} ")
    assert "allowed=0" in printed
    assert "verdicts" not in printed
    assert run(["logs", *here, "--ledger", "decisions", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["inputs"]["candidate"]["inner_step"] == 10
    assert run(["logs", *here, "--ledger", "uploads", "--json", "-n", "1"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["tag"], row["outcome"]) == ("5.56.60", "verified")
    assert run(["logs", *here, "--ledger", "repo_age"]) == 1
    assert run(["logs", *here, "--ledger", "secrets"]) == 64
    assert run(["report", *here, "-o", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.index("5.56.60") < page.index("5.56.51")
    assert "did not move" in page
