"""The audit judges the files that a validator would fetch now by the profile's rules, and never
answers `accepted` without reading them."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miner_guard.cli.main import run
from miner_guard.config import Config, GateSettings, RepoSettings
from miner_guard.eventlog.catalog import message
from miner_guard.state_dir import StateDir
from miner_guard.uploads import audit, gate
from miner_guard.uploads.audit import AuditMemory
from miner_guard.uploads.chain import NAMES
from miner_guard.validators.facts import Network, fingerprint
from miner_guard.validators.limits import Limits
from miner_guard.validators.profiles import load_profile
from miner_guard.validators.rules import epoch_scored
from miner_guard.validators.shapes import Shapes
from tests.support.published import FLAT, ages_to_the_hundred, chain, inspected_here, look, publish

__all__ = ["inspected_here"]

torch = pytest.importorskip("torch", reason="gradients.pt is torch's format")

SN38 = Limits.of(GateSettings(), load_profile("sn38").limits)
KEYS = {
    "R2_ACCOUNT_ID": "a" * 32,
    "R2_READ_ACCESS_KEY_ID": "b" * 32,
    "R2_READ_SECRET_ACCESS_KEY": "c" * 64,
}


def test_what_validators_accept_passes_and_says_what_was_checked(tmp_path: Path) -> None:
    publish(tmp_path)
    report = look(tmp_path)
    assert report.outcome == "accepted", report.detail
    assert {v.rule for v in report.verdicts} >= {
        "min_inner_step",
        "repo_age",
        "gradients",
        "block_list",
        "metadata",
    }
    assert message(report.event()).startswith(
        "AUDIT PASSED: epoch 56 (the network's: 300 blocks since the AllReduce)"
    )
    assert report.fetched_bytes > (tmp_path / "epoch-56" / "gradients.pt").stat().st_size


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inner": 0}, "min_inner_step: published inner_step 0 < 1: validators reject it"),
        ({"inner": 0}, "this is the upload after an AllReduce; the next gradient upload fixes it"),
        ({"age_s": 4900.0}, "repo_age: gradients are 4900s old >= 4800s: they score zero"),
        (
            {"blocks": [899]},
            "block_list: newest block in block_list is 201 blocks old (limit 200); "
            "validators reject it",
        ),
        ({"blocks": []}, "block_list: block_list is empty"),
        ({"wvals": torch.tensor([float("nan"), 1.0])}, "gradients: gradients.pt: w: NaN or Inf"),
        ({"outer": 55}, "epoch-56/gradients.pt does not exist"),
    ],
)
@pytest.mark.usefixtures("inspected_here")
def test_what_validators_reject_fails_with_rule_number_and_limit(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    publish(tmp_path, **change)
    report = look(tmp_path)
    assert report.outcome == "rejected"
    assert words in ages_to_the_hundred(report.detail)
    assert message(report.event()).startswith("AUDIT FAILED: epoch 56")
    assert report.event().level == "critical"


@pytest.mark.usefixtures("inspected_here")
def test_the_archive_after_an_outer_step_is_rejected_only_where_validators_do(
    tmp_path: Path,
) -> None:
    """Where no profile rejects archives, AUDIT FAILED must not follow directly on UPLOAD
    VERIFIED."""
    publish(tmp_path, inner=0, wvals=torch.zeros(2))
    free = Limits.of(GateSettings(), {})
    report = look(tmp_path, Network(reason="no [chain] configured"), free)
    assert report.outcome == "accepted", report.detail
    assert (
        "warning: this is the archive after an outer step (inner_step 0), not yet a gradient"
        in report.detail
    )
    rejected = look(tmp_path).detail
    assert "published inner_step 0 < 1: validators reject it" in rejected
    assert "this is the upload after an AllReduce; the next gradient upload fixes it" in rejected
    assert "all values are zero" not in rejected
    # This excuses neither a gradient, nor anything but zeros in an archive.
    publish(tmp_path, inner=60, wvals=torch.zeros(2))
    assert look(tmp_path, limits=free).outcome == "rejected"
    publish(tmp_path, inner=0, wvals=torch.tensor([float("nan"), 0.0]))
    assert look(tmp_path, limits=free).outcome == "rejected"


@pytest.mark.usefixtures("inspected_here")
def test_the_epoch_before_is_scored_in_the_first_half_after_an_allreduce(tmp_path: Path) -> None:
    publish(tmp_path, outer=55)
    publish(tmp_path, outer=56)
    os.unlink(tmp_path / "epoch-56" / "gradients.pt")
    assert look(tmp_path, chain(since=199)).outcome == "accepted"
    assert look(tmp_path, chain(since=200)).outcome == "rejected"
    scored = [
        epoch_scored(9, n, since, SN38)
        for n, since in ((56, 199), (56, 200), (0, 10), (56, None), (None, 10))
    ]
    assert [e.outer_step for e in scored if e is not None] == [55, 56, 0, 56, 9]
    assert epoch_scored(None, None, None, SN38) is None


@pytest.mark.usefixtures("inspected_here")
def test_without_a_chain_nothing_is_accepted_and_the_missing_setting_is_named(
    tmp_path: Path,
) -> None:
    publish(tmp_path)
    report = look(tmp_path, Network(reason="no [chain] configured"))
    assert report.outcome == "unknown"
    words = "not proven without the chain (no [chain] configured); set [chain] network"
    assert words in report.detail
    assert "as published; the network's outer step is unknown" in report.detail
    assert (
        "block_list unknown (the current block is unknown: no [chain] configured)" in report.detail
    )


@pytest.mark.usefixtures("inspected_here")
def test_gradients_that_have_not_changed_are_not_fetched_again(tmp_path: Path) -> None:
    publish(tmp_path)
    repo, memory = RepoSettings(kind="local", path=str(tmp_path)), AuditMemory()
    size = (tmp_path / "epoch-56" / "gradients.pt").stat().st_size
    reports = [audit.run(repo, FLAT, chain(), known=audit.Known(memory=memory)) for _ in range(2)]
    assert [r.outcome for r in reports] == ["accepted", "accepted"]
    assert reports[0].fetched_bytes > size > reports[1].fetched_bytes > 0
    # A different file, or a different model to compare it with, causes another inspection.
    publish(tmp_path, wvals=torch.tensor([float("nan"), 1.0]))
    assert audit.run(repo, FLAT, chain(), known=audit.Known(memory=memory)).outcome == "rejected"
    publish(tmp_path)
    fetched = [
        audit.run(repo, FLAT, chain(), known=audit.Known(model, memory)).fetched_bytes
        for model in (None, Shapes({"w": (2,)}))
    ]
    assert min(fetched) > size


def test_a_repo_that_cannot_be_inspected_is_unknown_and_never_accepted(tmp_path: Path) -> None:
    assert audit.run(RepoSettings(), FLAT, chain()).outcome == "unknown"
    publish(tmp_path)
    late = audit.run(
        RepoSettings(kind="local", path=str(tmp_path)),
        FLAT,
        chain(),
        child=audit.FetchChild(deadline_s=0.01),
    )
    assert (late.outcome, "no answer within 0.01 s" in late.detail) == ("unknown", True)
    blind = audit.run(
        RepoSettings(kind="local", path=str(tmp_path)),
        FLAT,
        chain(),
        child=audit.FetchChild(python="/nonexistent"),
    )
    assert blind.outcome == "unknown"
    assert message(blind.event()).startswith("AUDIT UNKNOWN")


@pytest.mark.usefixtures("inspected_here")
@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("metadata.json", "{torn", "metadata.json is not JSON"),
        ("metadata.json", "[" * 100_000, "metadata.json is not JSON"),
        ("metadata.json", "[1]", "metadata.json is not a JSON object"),
        ("epoch-56/config.json", "", "epoch-56/config.json is not JSON"),
    ],
)
def test_a_document_that_no_validator_can_read_is_rejected(
    tmp_path: Path, key: str, text: str, words: str
) -> None:
    """The audit must not answer `AUDIT UNKNOWN: could not look` when it has seen what is wrong."""
    publish(tmp_path)
    (tmp_path / key).write_text(text)
    report = look(tmp_path)
    assert report.outcome == "rejected", report.detail
    assert words in message(report.event())


def test_a_later_audit_removes_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise /tmp would grow by 2 GiB with each kill -9 of the guard."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, running = tmp_path / "miner-guard-audit-left", tmp_path / "miner-guard-audit-running"
    for folder in (left, running):
        folder.mkdir()
        (folder / "gradients.pt").write_bytes(b"x")
    os.utime(left, (0, 0))
    assert look(tmp_path / "repo").outcome == "rejected"
    assert [path.name for path in tmp_path.iterdir()] == [running.name]


@pytest.mark.usefixtures("inspected_here")
def test_an_empty_repo_is_rejected(tmp_path: Path) -> None:
    assert look(tmp_path, Network(reason="none")).outcome == "rejected"


@pytest.mark.usefixtures("inspected_here")
def test_a_commitment_of_other_keys_is_warned_of_where_it_was_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    ours = fingerprint("".join(KEYS.values()))
    good = Network(1100, 56, 300, ours, True, 7, None, time.monotonic())
    committed = replace(FLAT, commitment_chars=128)
    assert look(tmp_path, good, committed).outcome == "accepted"
    other = Network(1100, 56, 300, fingerprint("z" * 128), True, 7, None, time.monotonic())
    report = look(tmp_path, other, committed)
    assert report.outcome == "accepted"
    assert "warning: the read keys committed on chain are not the ones in use" in report.detail


def test_a_commitment_of_placeholders_is_rejected_unread(tmp_path: Path) -> None:
    """Validators start with all x's for every miner, and treat that as unset."""
    publish(tmp_path)
    for commitment in ("x" * 128, "a" * 32 + "x" * 32 + "c" * 64):
        report = audit.run(
            RepoSettings(kind="local", path=str(tmp_path)), FLAT, chain(), commitment
        )
        assert report.outcome == "rejected"
        assert "all x's" in report.detail


def test_an_account_on_chain_that_does_not_respond_is_rejected_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message once printed the name of a variable instead of the reason."""
    for name, value in zip(NAMES, ("o" * 32, "k" * 32, "s" * 64), strict=True):
        monkeypatch.setenv(name, value)
    publish(tmp_path)
    repo = RepoSettings(kind="local", path=str(tmp_path))
    child = audit.FetchChild(deadline_s=0.01)
    report = audit.run(repo, FLAT, chain(), "a" * 32 + "b" * 32 + "c" * 64, child=child)
    assert report.outcome == "rejected"
    assert "does not respond (no answer within 0.01 s); commit again" in report.detail


@pytest.mark.usefixtures("inspected_here")
def test_the_audit_names_the_validators_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    repo = f'[repo]\nkind = "local"\npath = "{tmp_path}/repo"\n'
    (tmp_path / "guard.toml").write_text(repo)
    run(["audit"])
    assert "judged by general rules only: no [miner] profile" in capsys.readouterr().out
    (tmp_path / "guard.toml").write_text(f'[miner]\nprofile = "sn38"\n{repo}')
    run(["audit"])
    assert "judged by the rules of dstrbtd/DistributedTraining at" in capsys.readouterr().out
    run(["audit", "--json"])
    named = json.loads(capsys.readouterr().out)["read_from"]
    assert named == load_profile("sn38").read_from


@pytest.mark.usefixtures("inspected_here")
def test_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["audit"]) == 69
    assert "AUDIT UNKNOWN" in capsys.readouterr().out
    (tmp_path / "guard.toml").write_text(f'[repo]\nkind = "local"\npath = "{tmp_path}/repo"\n')
    publish(tmp_path / "repo")
    assert run(["audit", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "accepted"
    publish(tmp_path / "repo", wvals=torch.zeros(2))
    assert run(["audit"]) == 1
    assert "all values are zero" in capsys.readouterr().out


@pytest.mark.usefixtures("inspected_here")
def test_gradients_whose_shapes_differ_from_the_models_are_rejected(tmp_path: Path) -> None:
    publish(tmp_path)
    repo = RepoSettings(kind="local", path=str(tmp_path))
    assert "shapes not checked" in str(audit.run(repo, FLAT, chain()).verdicts)
    fitting = audit.run(repo, FLAT, chain(), known=audit.Known(Shapes({"w": [3]})))
    assert fitting.outcome == "accepted"
    assert "with the model's shapes" in str(fitting.verdicts)
    other = audit.run(repo, FLAT, chain(), known=audit.Known(Shapes({"w": [2]})))
    assert other.outcome == "rejected"
    assert "w: index 2 is out of bounds (0 to 1)" in other.detail


@pytest.mark.usefixtures("inspected_here")
def test_a_state_directory_tells_what_its_guard_watches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(tmp_path / "repo", age_s=2100.0)
    state, elsewhere = StateDir(tmp_path / "state"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    local = RepoSettings(kind="local", path="repo")
    config = Config(repo=local, gate=GateSettings(repo_age_limit_s=9))
    limits = load_profile("sn38").limits
    gate.write(state.gate_inputs, gate.GateInputs(limits=limits, watched=gate.Watched.of(config)))
    monkeypatch.chdir(elsewhere)
    assert run(["audit", "--state-dir", str(state.root)]) == 69
    printed = capsys.readouterr()
    assert printed.out.startswith("AUDIT UNKNOWN: epoch 56 (as published")
    assert "not proven without the model's shapes" in printed.out
    assert "gradients are 2100s old (keep < 9s)" in ages_to_the_hundred(printed.out)
    assert f"auditing {tmp_path}/repo, which the guard in {state.root} watches" in printed.err
    state.gate_inputs.write_text('{"watched": 7}')
    assert run(["audit", "--state-dir", str(state.root)]) == 69
    assert "pass the -c or --state-dir that you passed to `run`" in capsys.readouterr().out


@pytest.mark.usefixtures("inspected_here")
def test_gradients_of_another_revision_than_the_metadata_are_warned_of(tmp_path: Path) -> None:
    publish(tmp_path)
    named = {"gradients.pt": {"size_bytes": 9, "checksum": "a" * 64}}
    metadata = json.loads((tmp_path / "metadata.json").read_text())
    (tmp_path / "metadata.json").write_text(json.dumps({**metadata, "files": named}))
    report = look(tmp_path)
    assert report.outcome == "accepted"
    assert (
        "but metadata.json describes a file of 9: an upload is in progress or was interrupted"
        in report.detail
    )
    # Validators score the previous epoch, which the root metadata does not describe.
    publish(tmp_path, outer=55)
    (tmp_path / "metadata.json").write_text(json.dumps({**metadata, "files": named}))
    assert "was cut off" not in look(tmp_path, chain(since=10)).detail
