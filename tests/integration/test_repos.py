"""Reading a published repo in S3 and on the Hub: what a validator finds, its age, and each refusal
in one sentence. The demo's own upload publishes what is read."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miner_guard.config import RepoSettings
from miner_guard.uploads.repos import look_at, open_repo
from miner_guard.uploads.repos.base import RepoError
from tests.servers import hub, s3
from tests.servers.revisions import publish
from tests.support import requires

BUCKET, REPO_ID = "llama-4b-ws-4-007", "miner/model"
LARGE = 2 * 1024 * 1024
"""Bytes: too large for the Hub's commit request."""

Served = tuple[RepoSettings, Any]


@pytest.fixture(params=["s3", "hf"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A repo's settings, and the switches of the server that holds it."""
    if request.param == "s3":
        requires.module("boto3")
        s3.keys(monkeypatch)
        with s3.bucket(BUCKET) as (settings, faults):
            yield settings, faults
        return
    requires.module("huggingface_hub")
    monkeypatch.setenv("HF_TOKEN", hub.TOKEN)
    # Large files go through LFS, which the stub has.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True, raising=False)
    with hub.stub() as (endpoint, state):
        yield RepoSettings(kind="hf", repo_id=REPO_ID, endpoint=endpoint), state


def test_published_is_what_a_validator_finds(server: Served, tmp_path: Path) -> None:
    settings, _ = server
    assert look_at(settings).published.empty
    for inner in (50, 60):
        published = publish(settings, tmp_path, inner, LARGE)
    found = look_at(settings).published
    assert (found.revision, found.config) == ("1.3.60", {"block_list": [60]})
    assert (found.size_bytes, found.checksum) == (LARGE, published.checksum)
    assert found.age_s is not None
    assert found.age_s < 60
    repo = open_repo(settings)
    assert repo.get("epoch-3/gradients.pt").startswith(b"60\n")
    assert json.loads(repo.get("metadata.json"))["inner_step"] == 60


@pytest.mark.parametrize("shift_s", [-7200.0, 7200.0])
def test_age_is_the_servers_age_whatever_this_hosts_clock(
    server: Served, tmp_path: Path, shift_s: float
) -> None:
    settings, switches = server
    if settings.kind == "s3" and shift_s > 0:
        pytest.skip("S3 rejects signatures from the past")
    switches.shift_s = shift_s
    publish(settings, tmp_path, 50)
    age_s = open_repo(settings).state().age_s
    assert age_s is not None
    assert age_s < 60


def test_a_connection_that_closes_in_the_middle_is_no_answer(
    server: Served, tmp_path: Path
) -> None:
    settings, switches = server
    publish(settings, tmp_path, 50)
    switches.half_close = True
    with pytest.raises(RepoError, match=r"no response from|cut off|no valid Date"):
        open_repo(settings).state()
    switches.half_close = False
    assert open_repo(settings).state().inner_step == 50


@pytest.mark.parametrize("kind", ["s3", "hf"])
def test_a_silent_server_costs_the_deadline_and_no_more(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.keys(monkeypatch)
    monkeypatch.setenv("HF_TOKEN", hub.TOKEN)
    with s3.silent() as endpoint:
        settings = RepoSettings(
            kind=kind,  # type: ignore[arg-type]
            bucket=BUCKET,
            repo_id=REPO_ID,
            endpoint=endpoint,
        )
        with pytest.raises(TimeoutError):  # The attack works.
            urllib.request.urlopen(endpoint, timeout=1)
        start = time.monotonic()
        found = look_at(settings).published
        assert (found.age_s, found.empty) == (None, False)
        # On a busy machine, the probe's own deadline may pass first.
        assert re.search("no response from|no answer within 20 s", str(found.reason))
        assert time.monotonic() - start < 60, "20 s are meant"


@pytest.mark.parametrize("server", ["s3"], indirect=True)
@pytest.mark.parametrize(
    ("refuse", "words"),
    [
        ((403, "InvalidAccessKeyId"), "rejected the keys"),
        ((403, "SignatureDoesNotMatch"), "rejected the keys"),
        ((404, "NoSuchBucket"), f"bucket {BUCKET} does not exist"),
        ((403, "RequestTimeTooSkewed"), "this host's clock is wrong"),
        ((503, "SlowDown"), "busy (503 SlowDown)"),
    ],
)
def test_each_refusal_is_one_clear_sentence(
    server: Served, tmp_path: Path, refuse: tuple[int, str], words: str
) -> None:
    settings, faults = server
    publish(settings, tmp_path, 50)
    faults.refuse = refuse
    with pytest.raises(RepoError, match=re.escape(words)):
        open_repo(settings).state()


@pytest.mark.parametrize("server", ["hf"], indirect=True)
def test_the_hubs_refusals_and_a_commit_to_another_file(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Editing a model card made the gradients look newly published."""
    settings, state = server
    state.shift_s = -3000.0
    publish(settings, tmp_path, 50)
    state.shift_s = 0.0
    from huggingface_hub import HfApi

    api = HfApi(endpoint=settings.endpoint)
    api.upload_file(path_or_fileobj=b"what", path_in_repo="README.md", repo_id=REPO_ID)
    age_s = look_at(settings).published.age_s
    assert age_s is not None
    assert 2990 < age_s < 3100
    state.refuse = 503
    with pytest.raises(RepoError, match=r"the Hub is busy \(503\)"):
        open_repo(settings).state()
    state.refuse = None
    monkeypatch.setenv("HF_TOKEN", "hf_" + "wrong" * 6)
    with pytest.raises(RepoError, match="the Hub rejected the token"):
        open_repo(settings).state()
