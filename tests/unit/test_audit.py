"""The audit judges the files that a validator would fetch now by the profile's rules, and never
answers `accepted` without reading them."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from miner_guard.cli.main import run
from miner_guard.config import Config, GateSettings, MinerSettings, RepoSettings
from miner_guard.record.events import Event, event
from miner_guard.system.clock import FakeClock
from miner_guard.uploads import audit
from miner_guard.uploads.chain import NAMES
from miner_guard.validators.facts import Network
from miner_guard.validators.limits import Limits
from miner_guard.validators.profiles import load_profile
from miner_guard.watch.uploads import AuditMonitor
from tests.support.contexts import JobsLater, context
from tests.support.published import FLAT, ages_to_the_hundred, chain, inspected_here, look, publish

__all__ = ["inspected_here"]

torch = pytest.importorskip("torch", reason="gradients.pt is torch's format")

SN38 = Limits.of(GateSettings(), load_profile("sn38").limits)


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
    assert report.event().text.startswith(
        "AUDIT PASSED: epoch 56 (the network's: 300 blocks since the AllReduce)"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"age_s": 4900.0}, "repo_age: gradients are 4900s old >= 4800s: they score zero"),
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
    assert report.event().text.startswith("AUDIT FAILED: epoch 56")
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


def test_a_repo_that_cannot_be_inspected_is_unknown_and_never_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert audit.Audit(RepoSettings(), FLAT, chain()).report().outcome == "unknown"
    publish(tmp_path)
    repo = RepoSettings(kind="local", path=str(tmp_path))
    late = audit.Audit(repo, FLAT, chain()).report(deadline_s=0.01)
    assert (late.outcome, "no answer within 0.01 s" in late.detail) == ("unknown", True)
    assert late.event().text.startswith("AUDIT UNKNOWN")
    monkeypatch.setattr(audit, "inspect_file", lambda *_, **__: {"reason": "torch is broken"})
    assert audit.Audit(repo, FLAT, chain()).report().outcome == "unknown"


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


def test_a_commitment_of_placeholders_is_rejected_unread(tmp_path: Path) -> None:
    """Validators start with all x's for every miner, and treat that as unset."""
    publish(tmp_path)
    for commitment in ("x" * 128, "a" * 32 + "x" * 32 + "c" * 64):
        repo = RepoSettings(kind="local", path=str(tmp_path))
        report = audit.Audit(repo, SN38, chain(), commitment).report()
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
    committed = "a" * 32 + "b" * 32 + "c" * 64
    report = audit.Audit(repo, SN38, chain(), committed).report(deadline_s=0.01)
    assert report.outcome == "rejected"
    assert "does not respond (no answer within 0.01 s); commit again" in report.detail


@pytest.mark.usefixtures("inspected_here")
def test_exit_codes_and_whose_rules_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["audit"]) == 69
    assert "AUDIT UNKNOWN" in capsys.readouterr().out
    repo = f'[repo]\nkind = "local"\npath = "{tmp_path}/repo"\n'
    (tmp_path / "guard.toml").write_text(repo)
    publish(tmp_path / "repo")
    assert run(["audit", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "accepted"
    publish(tmp_path / "repo", wvals=torch.zeros(2))
    assert run(["audit"]) == 1
    out = capsys.readouterr().out
    assert "all values are zero" in out
    assert "judged by general rules only: no [miner] profile" in out
    (tmp_path / "guard.toml").write_text(f'[miner]\nprofile = "sn38"\n{repo}')
    run(["audit", "--json"])
    named = json.loads(capsys.readouterr().out)["read_from"]
    assert named == load_profile("sn38").read_from


# on a schedule

PUSHED = event(
    "upload_succeeded", "info", "UPLOAD VERIFIED: tag 5.56.51 -", tag="5.56.51", detail="-"
)


def test_an_audit_follows_each_verified_push_and_a_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a published gradient could score zero for hours before anybody notices."""
    jobs, emitted = JobsLater(), list[Event]()
    accepted = audit.AuditReport("accepted", "epoch 56")
    reports = iter((accepted, accepted, audit.AuditReport("rejected", "epoch 56: too old")))
    monkeypatch.setattr(audit, "audit_repo", lambda *_: next(reports))
    config = Config(
        miner=MinerSettings(profile="sn38"), repo=RepoSettings(kind="local", path=str(tmp_path))
    )
    given = {"config": config, "clock": FakeClock(), "emit": emitted.append, "jobs": jobs}
    monitor = AuditMonitor(context(tmp_path, **given))
    assert jobs.every_s["audit"] == 600.0
    assert list(monitor.on_event(PUSHED)) == []
    jobs.run()
    assert len(emitted) == 1
    jobs.repeated["audit"]()
    # A repeated verdict is not reported again.
    assert [f.level for f in emitted] == ["info", "debug"]
    jobs.repeated["audit"]()
    assert emitted[-1].text == "AUDIT FAILED: epoch 56: too old"


def test_a_miner_that_has_published_nothing_yet_is_not_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once began with a critical AUDIT FAILED: nothing is published."""
    emitted, status = list[Event](), dict[str, Any]()
    rejected = audit.AuditReport("rejected", "nothing is published")
    monkeypatch.setattr(audit, "audit_repo", lambda *_: rejected)
    config = Config(
        miner=MinerSettings(profile="sn38"), repo=RepoSettings(kind="local", path=str(tmp_path))
    )
    jobs = JobsLater()
    given = {"config": config, "clock": FakeClock(), "emit": emitted.append, "jobs": jobs}
    AuditMonitor(context(tmp_path, status=lambda: status, **given))
    status["uploads"] = {"repo": {"empty": True}}
    jobs.repeated["audit"]()
    assert emitted == []
    status["uploads"]["upload"] = {"outcome": "verified"}
    jobs.repeated["audit"]()
    assert [event.name for event in emitted] == ["audit_failed"], "what was published is gone"
