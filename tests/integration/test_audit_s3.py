"""The audit works like a validator: it uses the keys committed on chain, against a server that
checks them."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from miner_guard.config import GateSettings, RepoSettings
from miner_guard.uploads import audit
from miner_guard.uploads.chain import master_state
from miner_guard.validators.facts import Network, fingerprint
from miner_guard.validators.limits import Limits
from miner_guard.validators.profiles import load_profile
from tests.servers import s3
from tests.support import requires

torch = pytest.importorskip("torch", reason="gradients.pt is torch's format")

BUCKET, MASTER = "llama-4b-ws-4-007", "llama-4b-ws-4"
ACCOUNT, KEY, SECRET = "a" * 32, "b" * 32, "c" * 64
COMMITTED = ACCOUNT + KEY + SECRET

pytestmark = pytest.mark.slow


@pytest.fixture
def limits(tmp_path: Path) -> Iterator[Limits]:
    """The profile's limits, with a local server in place of R2 that accepts only the committed
    keys."""
    requires.module("boto3")
    served = tmp_path / "served"
    (served / BUCKET / "epoch-56").mkdir(parents=True)
    (served / MASTER / "epoch-56").mkdir(parents=True)
    (served / MASTER / "metadata.json").write_text(
        '{"outer_step": 56, "inner_step": 0, "peer_id": "m"}'
    )
    (served / MASTER / "epoch-56" / "config.json").write_text('{"last_allreduce_block": 800}')
    torch.save(
        {"widxs": torch.tensor([1, 2]), "wvals": torch.tensor([0.5, -0.5]), "metadata": {}},
        served / BUCKET / "epoch-56" / "gradients.pt",
    )
    (served / BUCKET / "epoch-56" / "config.json").write_text('{"block_list": [1000]}')
    metadata = {"run": "5", "outer_step": 56, "inner_step": 84, "peer_id": "x"}
    (served / BUCKET / "metadata.json").write_text(json.dumps(metadata))
    numbers = {**load_profile("sn38").limits, "gradients_chunk": None}
    with s3.rclone(requires.tool("rclone"), served, (KEY, SECRET)) as endpoint:
        yield dataclasses.replace(Limits.of(GateSettings(), numbers), endpoint=endpoint)


@pytest.fixture
def repo(monkeypatch: pytest.MonkeyPatch) -> RepoSettings:
    for name in (*s3.KEYS, "R2_ACCOUNT_ID", "R2_READ_ACCESS_KEY_ID", "R2_READ_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    return RepoSettings(kind="s3", bucket=BUCKET)


def test_the_committed_keys_open_what_the_audit_judges(limits: Limits, repo: RepoSettings) -> None:
    master = master_state(repo, limits, COMMITTED)
    assert (master.outer_step, master.config) == (56, {"last_allreduce_block": 800})
    network = Network(1050, 56, 250, fingerprint(COMMITTED), True, 7, None, time.monotonic())
    report = audit.Audit(repo, limits, network, COMMITTED).report()
    assert report.outcome == "accepted", report.detail
    assert report.credentials == "commitment"
    assert {v.rule: v.outcome for v in report.verdicts}["bucket"] == "pass"


def test_committed_keys_that_open_nothing_are_rejected_as_by_a_validator(
    limits: Limits, repo: RepoSettings
) -> None:
    wrong = ACCOUNT + KEY + "d" * 64
    network = Network(1050, 56, 250, fingerprint(wrong), True, 7, None, time.monotonic())
    report = audit.Audit(repo, limits, network, wrong).report()
    assert report.outcome == "rejected"
    assert "the keys committed on chain cannot open the bucket" in report.detail
    assert "rejected the keys" in str(master_state(repo, limits, wrong).reason)
    assert "d" * 64 not in report.detail


def test_the_keys_of_others_are_distinguished_from_ours(
    limits: Limits, repo: RepoSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R2_ACCOUNT_ID", ACCOUNT)
    monkeypatch.setenv("R2_READ_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("R2_READ_SECRET_ACCESS_KEY", SECRET)
    configured = dataclasses.replace(repo, endpoint=limits.endpoint)
    network = Network(1050, 56, 250, fingerprint("e" * 128), True, 7, None, time.monotonic())
    report = audit.Audit(configured, limits, network).report()
    assert {v.rule: v.outcome for v in report.verdicts}["commitment"] == "warn", report.detail
    network = Network(1050, 56, 250, fingerprint(COMMITTED), True, 8, None, time.monotonic())
    assert (
        "bucket 'llama-4b-ws-4-007': validators look for 'llama-4b-ws-4-008'; rename the bucket"
        in audit.Audit(configured, limits, network).report().detail
    )
