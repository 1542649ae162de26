"""Publishing to a Hugging Face repo: one commit, one tag, and the same from two generations of huggingface_hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from miner_guard.config import RepoSettings
from tests import needs
from tests.servers import hub, s3
from uploads.journal import Journal, journal_path
from uploads.publisher import Publisher, PublishError, Retry, Revision
from uploads.repos import look_at, open_repo
from uploads.repos.base import RepoError

REPO_ID = "me/llama-4b-ws-4-007"
OLDER_GENERATION = "huggingface_hub==0.25.2"


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    needs.module("huggingface_hub")
    monkeypatch.setenv("HF_TOKEN", hub.TOKEN)
    # Large files go through LFS, which the stub has, in the older and the newer library alike.
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    # The variable is read at the import, which another test of this process may have done.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True, raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")


@pytest.fixture
def server() -> Iterator[tuple[RepoSettings, hub.HubState]]:
    with hub.stub() as (endpoint, state):
        yield RepoSettings(kind="hf", repo_id=REPO_ID, endpoint=endpoint, timeout_s=20.0), state


def revision(folder: Path, inner: int) -> Revision:
    own = folder / f"revision-{inner}"
    own.mkdir()
    (own / "gradients.pt").write_bytes(os.urandom(200_000))
    (own / "config.json").write_text(json.dumps({"block_list": [inner]}))
    (own / "metadata.json").write_text(json.dumps({"run": 1, "outer_step": 3, "inner_step": inner, "peer_id": "d"}))
    return Revision(own, 1, 3, inner)


def publish(settings: RepoSettings, what: Revision, folder: Path, deadline_s: float = 60.0) -> None:
    repo = open_repo(settings)
    journal = Journal(journal_path(folder, repo.label))
    Publisher(repo, journal, lambda _l: None, Retry(deadline_s=deadline_s)).publish(what)


def test_a_revision_is_one_commit_and_one_tag(server: tuple[RepoSettings, hub.HubState], tmp_path: Path) -> None:
    settings, state = server
    assert look_at(settings).empty
    for inner in (50, 60):
        publish(settings, revision(tmp_path, inner), tmp_path)
    seen = look_at(settings)
    assert (seen.revision, seen.config, seen.size_bytes) == ("1.3.60", {"block_list": [60]}, 200_000)
    assert seen.age_s is not None
    assert seen.age_s < 60
    commits = state.repos[REPO_ID]
    assert [c.title for c in commits] == ["Revision 1.3.60", "Revision 1.3.50", "initial commit"]
    assert state.tags == {"1.3.60": commits[0].id, "1.3.50": commits[1].id}


def test_repeating_a_commit_that_was_cut_off_changes_nothing_seen(
    server: tuple[RepoSettings, hub.HubState], tmp_path: Path
) -> None:
    settings, state = server
    what = revision(tmp_path, 50)
    repo = open_repo(settings)
    tickets = [repo.stage(key, path, lambda _n: None, {}) for key, path in what.files()]
    repo.commit(tickets, what.tag)
    files = state.repos[REPO_ID][0].files
    repo.commit(tickets, what.tag)
    assert state.repos[REPO_ID][0].files == files


def test_a_refused_token_and_a_busy_hub_are_said(
    server: tuple[RepoSettings, hub.HubState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, state = server
    publish(settings, revision(tmp_path, 50), tmp_path)
    state.refuse = 503
    with pytest.raises(PublishError, match=r"the Hub is busy \(503\)"):
        publish(settings, revision(tmp_path, 60), tmp_path, 1.0)
    state.refuse = None
    monkeypatch.setenv("HF_TOKEN", "hf_" + "wrong" * 6)
    with pytest.raises(RepoError, match="the Hub refuses the token"):
        open_repo(settings).state()


def test_a_silent_hub_costs_the_deadline_and_no_more() -> None:
    with s3.silent() as endpoint:
        start = time.monotonic()
        seen = look_at(RepoSettings(kind="hf", repo_id=REPO_ID, endpoint=endpoint, timeout_s=4.0))
        assert "no answer" in str(seen.reason)
        assert time.monotonic() - start < 20


@pytest.mark.long
def test_an_older_generation_does_the_same(server: tuple[RepoSettings, hub.HubState], tmp_path: Path) -> None:
    """huggingface_hub below 1.0, which transformers 4.39 holds the miner at: requests instead of httpx."""
    settings, state = server
    older = tmp_path / "older"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(older), OLDER_GENERATION]
    installed = subprocess.run(install, capture_output=True, text=True)
    if installed.returncode != 0:
        pytest.skip(f"{OLDER_GENERATION} could not be installed: {installed.stderr.strip().splitlines()[-1:]}")
    env = {**os.environ, "PYTHONPATH": f"{older}{os.pathsep}{needs.REPO}"}
    what = revision(tmp_path, 50)
    request = {
        "repo": asdict(settings), "journal_folder": str(tmp_path), "deadline_s": 60.0,
        "revision": {**asdict(what), "folder": str(what.folder)},
    }  # fmt: skip
    version = subprocess.run(
        [sys.executable, "-c", "import huggingface_hub; print(huggingface_hub.__version__)"],
        env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert version.stdout.strip() == OLDER_GENERATION.partition("==")[2]
    pushed = subprocess.run(
        [sys.executable, "-m", "uploads.push"], input=json.dumps(request), env=env, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert "Successfully pushed new model state with tag 1.3.50" in pushed.stdout
    assert pushed.returncode == 0
    assert state.tags.keys() == {"1.3.50"}
    assert look_at(settings).revision == "1.3.50"
