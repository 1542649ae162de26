"""The gate: nothing invalid goes out, unknown values are reported and do not block, and every
decision holds what the rules read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miner_guard.cli.main import run
from miner_guard.config import GateSettings
from miner_guard.record.store import RunStore, decision_row, upload_row
from miner_guard.uploads import gate
from miner_guard.uploads.gate import GateInputs, decide
from miner_guard.validators import rules
from miner_guard.validators.facts import Candidate, Decision, Network, Published
from miner_guard.validators.profiles import load_profile

NOW, WALL = 10_000.0, 1_767_323_045.0
SETTINGS = GateSettings()
SN38 = load_profile("sn38").limits


def inputs(
    age_s: float | None = 600.0, *, outer_step: int | None = 56, written: float = NOW - 10
) -> GateInputs:
    published = Published(
        age_s=age_s, reason=None if age_s is not None else "no answer within 20 s", seen_at=written
    )
    network = Network(
        outer_step=outer_step, reason=None if outer_step is not None else "no [chain] configured"
    )
    return GateInputs(published, network, written_monotonic=written)


def ask(
    inner_step: int = 84,
    kind: str = "gradient",
    known: GateInputs | None = None,
    settings: GateSettings = SETTINGS,
    **more: object,
) -> Decision:
    given = {"loss": 3.4, "base_outer_step": 56, **more}
    candidate = Candidate(kind, 56, inner_step, **given)  # type: ignore[arg-type]
    return decide(candidate, inputs() if known is None else known, settings, now=NOW, wall=WALL)


def outcomes(decision: Decision) -> dict[str, str]:
    return {v.rule: v.outcome for v in decision.verdicts}


def test_below_the_minimum_blocks_word_for_word() -> None:
    decision = ask(15)
    assert not decision
    assert decision.reason == (
        "inner_step (15) < minimum (50). Validators will reject this! Waiting for more "
        "training steps..."
    )
    assert decision.retry_after_steps == 35
    assert ask(50).allowed


def test_the_archive_after_an_outer_step_is_allowed_at_inner_step_0() -> None:
    decision = ask(0, "archive")
    assert decision.allowed
    assert outcomes(decision)["min_inner_step"] == "pass"
    # On the line for a required upload, these words would only alarm the person on call.
    assert "Validators will reject this" not in decision.reason
    assert "archive at inner_step 0: exempt" in decision.reason


@pytest.mark.parametrize(
    "unsound",
    [
        {"loss": math.nan},
        {"files": {"params": 2, "problems": ["nan in w"]}},
        {"known": replace(inputs(), bucket="x-007", network=Network(uid=8), limits=SN38)},
    ],
)
def test_only_the_minimum_inner_step_does_not_apply_to_an_archive(unsound: Any) -> None:
    """An archive with a NaN was let out with a warning and reported as verified, while the audit
    rejected it."""
    decision = ask(0, "archive", **unsound)
    assert not decision.allowed
    assert outcomes(decision)["min_inner_step"] == "pass"


def test_shadow_mode_says_what_it_would_do_and_blocks_nothing() -> None:
    decision = ask(15, settings=GateSettings(mode="shadow"))
    assert decision.allowed
    assert decision.shadow
    assert decision.reason.startswith(
        "shadow mode, would be blocked: inner_step (15) < minimum (50)"
    )
    assert not ask(84, settings=GateSettings(mode="shadow")).shadow


def test_repo_age_too_soon_due_and_stale() -> None:
    spaced = GateSettings(min_upload_interval_s=1000.0)
    soon = ask(known=inputs(590.0), settings=spaced)
    assert not soon
    assert soon.retry_after_s == 400.0
    due, stale = ask(known=inputs(1850.0)), ask(known=inputs(2100.0))
    assert (due.allowed, due.due, due.stale) == (True, True, False)
    assert (stale.allowed, stale.due, stale.stale) == (True, True, True)
    empty = ask(
        known=GateInputs(Published(empty=True, reason=None), written_monotonic=NOW), settings=spaced
    )
    assert empty.allowed
    assert empty.due


def test_unknown_does_not_block_but_is_reported_and_local_rules_still_apply() -> None:
    decision = ask(known=inputs(None, outer_step=None))
    assert decision.allowed
    assert outcomes(decision)["repo_age"] == "unknown"
    assert "repo age unknown: no answer within 20 s" in decision.reason
    assert not decision.due
    assert not ask(15, known=inputs(None))


def test_an_error_inside_a_rule_blocks_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(rules, "GATE", ((broken, lambda *_: True),))
    decision = ask()
    assert not decision
    assert "the rule broken failed: ZeroDivisionError: planted" in decision.reason


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        (b"", "torn"),
        (b'{"published": {"age_s"', "torn"),
        (b"\xff\xfe\x00", "torn"),
        (b"[1, 2]", "by a different version"),
        (b'{"published": {"age": 7}, "network": {}}', "by a different version"),
        (b'{"published": {}, "network": 7}', "by a different version"),
    ],
)
def test_a_damaged_inputs_file_is_unknown_and_never_a_crash(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "gate-inputs.json"
    if content is not None:
        path.write_bytes(content)
    known = gate.read(path)
    assert words in str(known.reason)
    decision = ask(known=known)
    assert decision.allowed
    assert outcomes(decision)["repo_age"] == "unknown"
    assert words in decision.reason
    assert not ask(15, known=known)


def test_inputs_of_a_dead_guard_or_an_earlier_boot_are_unknown() -> None:
    old = ask(known=inputs(written=NOW - 400))
    assert "gate-inputs.json is 400s old (limit 300s)" in old.reason
    assert "before this host's last boot" in ask(known=inputs(written=NOW + 5)).reason


@pytest.mark.parametrize("loss", [None, 3.4, math.nan, math.inf])
def test_a_decision_comes_back_whole_from_the_journal(loss: float | None) -> None:
    long, steps = "x" * 4000, {"run": "5", "outer_step": 55, "inner_step": 54}
    files = {"params": 2, "problems": ["nan in w", "\ud800"]}
    known = GateInputs(Published(reason=long), Network(reason=long), None, None, SN38, NOW)
    given = {"files": files, "config": {"block_list": [1, 2]}, "metadata": steps}
    decided = ask(3, known=known, loss=loss, recent_losses=(math.nan,) * 12, **given)
    assert {"loss", "gradients", "block_list", "metadata"} <= outcomes(decided).keys()
    sent = json.loads(json.dumps(decided.as_dict(), allow_nan=False))
    assert json.loads(json.dumps(Decision.from_dict(sent).as_dict())) == sent


# miner-guard gate

Ask = Callable[..., int]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run(["gate", "--state-dir", str(tmp_path), *arguments])


def test_exit_codes_and_words(shell: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell("--outer-step", "56", "--inner-step", "15") == 1
    out = capsys.readouterr().out
    assert out.startswith(
        "UPLOAD BLOCKED: inner_step (15) < minimum (50). Validators will reject this!"
    )
    assert "unknown  repo_age" in out
    assert shell("--outer-step", "56", "--inner-step", "50") == 0
    assert shell("--outer-step", "56", "--inner-step", "0", "--kind", "archive") == 0
    assert shell("--outer-step", "56", "--inner-step", "-1") == 64


def test_json_is_the_whole_decision_and_nothing_else(
    shell: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell("--outer-step", "56", "--inner-step", "15", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["allowed"], document["retry_after_steps"]) == (False, 35)
    assert shell("--outer-step", "56", "--inner-step", "60", "--loss", "nan", "--json") == 1
    json.loads(capsys.readouterr().out)


def test_the_profiles_limits_apply_without_a_running_guard(
    shell: Ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "guard.toml").write_text('[miner]\nprofile = "sn38"\n')
    (tmp_path / "config.json").write_text('{"block_list": []}')
    assert shell("--outer-step", "5", "--inner-step", "60", "--config-json", "config.json") == 1
    assert "block_list is empty" in capsys.readouterr().out


def test_without_a_guard_a_gate_question_leaves_nothing_behind(shell: Ask, tmp_path: Path) -> None:
    assert shell("--outer-step", "56", "--inner-step", "60") == 0
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_inspected_where_it_is_named(
    shell: Ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gradients.pt").write_bytes(b"")
    assert shell("--outer-step", "5", "--inner-step", "60", "--gradients", "gradients.pt") in (0, 1)
    out = capsys.readouterr().out
    assert "gradients.pt: the file is empty" in out or "torch cannot be imported" in out


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
    assert row["inner_step"] == 10
    assert row["verdicts"] == decision.as_dict()["verdicts"]
    assert run(["logs", *here, "--ledger", "uploads", "--json", "-n", "1"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["tag"], row["outcome"]) == ("5.56.60", "verified")
    assert run(["logs", *here, "--ledger", "secrets"]) == 64
    assert run(["report", *here, "-o", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.index("5.56.60") < page.index("5.56.51")
    assert "did not move" in page
