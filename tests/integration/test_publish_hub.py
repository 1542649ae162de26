"""Publishing to a Hugging Face repo: one commit and one tag, with the same result in two
generations of huggingface_hub."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miner_guard.config import RepoSettings
from miner_guard.uploads.journal import Journal, journal_path
from miner_guard.uploads.publisher import Cancelled, Publisher, PublishError, Retry, Revision
from miner_guard.uploads.repos import look_at, open_repo
from miner_guard.uploads.repos.base import RepoError
from tests.servers import hub, s3
from tests.servers.killing import publishers, push_request, wait_for_the_recovery
from tests.servers.revisions import inner_step_of, revision
from tests.support import requires

REPO_ID = "me/llama-4b-ws-4-007"
OLDER = "huggingface_hub==0.25.2"
"""transformers 4.39 limits the miner to versions below 1.0, which use requests instead of httpx."""

LARGE = 1_500_000
"""A file of this size or more is sent before the commit."""


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    requires.module("huggingface_hub")
    monkeypatch.setenv("HF_TOKEN", hub.TOKEN)
    # Large files go through LFS, which the stub has, in the older and the newer library alike.
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    # The variable is read at the import, which another test of this process may have done.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True, raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RepoSettings, hub.HubState]]:
    with hub.stub() as (endpoint, state):
        # Before 1.0 the library reads answers by the endpoint that it found at its import.
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint, raising=False)
        yield RepoSettings(kind="hf", repo_id=REPO_ID, endpoint=endpoint, timeout_s=20.0), state


def publish(settings: RepoSettings, what: Revision, folder: Path, deadline_s: float = 60.0) -> None:
    repo = open_repo(settings)
    journal = Journal(journal_path(folder, repo.label))
    Publisher(repo, journal, lambda _l: None, Retry(deadline_s=deadline_s)).publish(what)


def test_a_revision_is_one_commit_and_one_tag(
    server: tuple[RepoSettings, hub.HubState], tmp_path: Path
) -> None:
    settings, state = server
    assert look_at(settings).empty
    for inner in (50, 60):
        publish(settings, revision(tmp_path, inner, LARGE), tmp_path)
    seen = look_at(settings)
    assert (seen.revision, seen.config, seen.size_bytes) == ("1.3.60", {"block_list": [60]}, LARGE)
    assert seen.age_s is not None
    assert seen.age_s < 60
    assert (
        seen.checksum
        == hashlib.sha256((tmp_path / "revision-60" / "gradients.pt").read_bytes()).hexdigest()
    )
    assert len(open_repo(settings).get("epoch-3/gradients.pt")) == LARGE
    commits = state.repos[REPO_ID]
    assert [c.title for c in commits] == ["Revision 1.3.60", "Revision 1.3.50", "initial commit"]
    assert state.tags == {"1.3.60": commits[0].id, "1.3.50": commits[1].id}


def test_a_republished_tag_names_the_latest_files(
    server: tuple[RepoSettings, hub.HubState], tmp_path: Path
) -> None:
    """When a miner resumed from a checkpoint and reached the same step again, the tag still named
    the older files."""
    settings, state = server
    for folder in (tmp_path / "before", tmp_path / "after"):
        folder.mkdir()
        publish(settings, revision(folder, 50, LARGE), tmp_path)
    assert state.tags == {"1.3.50": state.repos[REPO_ID][0].id}


def test_repeating_an_interrupted_commit_changes_nothing_visible(
    server: tuple[RepoSettings, hub.HubState], tmp_path: Path
) -> None:
    settings, state = server
    what = revision(tmp_path, 50, LARGE)
    repo = open_repo(settings)
    tickets = [repo.stage(key, path, lambda _n: None, {}) for key, path in what.files()]
    repo.commit(tickets, what.tag)
    files = state.repos[REPO_ID][0].files
    repo.commit(tickets, what.tag)
    assert state.repos[REPO_ID][0].files == files


def test_a_refused_token_and_a_busy_hub_are_reported(
    server: tuple[RepoSettings, hub.HubState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, state = server
    publish(settings, revision(tmp_path, 50, LARGE), tmp_path)
    state.refuse = 503
    with pytest.raises(PublishError, match=r"the Hub is busy \(503\)"):
        publish(settings, revision(tmp_path, 60, LARGE), tmp_path, 1.0)
    state.refuse = None
    monkeypatch.setenv("HF_TOKEN", "hf_" + "wrong" * 6)
    with pytest.raises(RepoError, match="the Hub rejected the token"):
        open_repo(settings).state()


def test_a_storm_of_503_is_survived_and_reported(
    server: tuple[RepoSettings, hub.HubState], tmp_path: Path
) -> None:
    settings, state = server
    publish(settings, revision(tmp_path, 50, LARGE), tmp_path)
    state.slow_downs, lines = 3, list[str]()
    repo = open_repo(settings)
    journal = Journal(journal_path(tmp_path, repo.label))
    Publisher(repo, journal, lines.append, Retry(backoff_s=0.02, backoff_max_s=0.2)).publish(
        revision(tmp_path, 60, LARGE)
    )
    assert any("the Hub is busy (503); trying again in" in line for line in lines)
    assert shown(state, "main") == {60}


def test_half_closed_connections_do_not_count_as_an_answer_and_may_be_retried(
    server: tuple[RepoSettings, hub.HubState], tmp_path: Path
) -> None:
    settings, state = server
    publish(settings, revision(tmp_path, 50, LARGE), tmp_path)
    state.half_close = True
    with pytest.raises(RepoError, match="no response from the Hub") as error:
        open_repo(settings).state()
    assert error.value.transient
    with pytest.raises(PublishError, match="no response from the Hub"):
        publish(settings, revision(tmp_path, 60, LARGE), tmp_path, 1.0)
    state.half_close = False
    assert open_repo(settings).state().inner_step == 50


@pytest.mark.parametrize("key", ["metadata.json", "epoch-3/gradients.pt"])
def test_a_truncated_document_does_not_count_as_an_answer(
    server: tuple[RepoSettings, hub.HubState], tmp_path: Path, key: str
) -> None:
    """A connection that was cut off must not cause `not JSON; publish again` and a failed audit."""
    settings, state = server
    publish(settings, revision(tmp_path, 50, LARGE), tmp_path)
    repo: Any = open_repo(settings)
    state.half_close = True
    for read in (repo.get, repo._hash_of):
        with pytest.raises(RepoError, match="cut off") as caught:
            read(key)
        assert caught.value.transient


@pytest.mark.parametrize("shift_s", [-7200.0, 7200.0])
def test_age_is_the_hubs_age_whatever_this_hosts_clock(
    server: tuple[RepoSettings, hub.HubState], tmp_path: Path, shift_s: float
) -> None:
    settings, state = server
    state.shift_s = shift_s
    publish(settings, revision(tmp_path, 50, LARGE), tmp_path)
    age_s = open_repo(settings).state().age_s
    assert age_s is not None
    assert age_s < 60


def test_a_commit_to_another_file_does_not_change_the_gradients_age(
    server: tuple[RepoSettings, hub.HubState], tmp_path: Path
) -> None:
    """Editing a model card made the gradients look newly published, and a push look as if it had
    arrived."""
    settings, state = server
    state.shift_s = -3000.0
    publish(settings, revision(tmp_path, 50, LARGE), tmp_path)
    state.shift_s = 0.0
    open_repo(settings).put("README.md", b"what a model")
    seen = look_at(settings)
    assert seen.age_s is not None
    assert 2990 < seen.age_s < 3100


def test_a_silent_hub_costs_the_deadline_and_no_more() -> None:
    with s3.silent() as endpoint:
        start = time.monotonic()
        seen = look_at(RepoSettings(kind="hf", repo_id=REPO_ID, endpoint=endpoint, timeout_s=4.0))
        assert "no response" in str(seen.reason)
        assert time.monotonic() - start < 60, "4 s are meant, of a Hub that never answers"


@pytest.fixture(params=["installed", pytest.param("older", marks=pytest.mark.long)])
def generation(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of a publisher with this generation of huggingface_hub."""
    if request.param == "installed":
        return {}
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "miner-guard-tests"
    home = base / f"{OLDER.replace('==', '-')}-py{sys.version_info[0]}{sys.version_info[1]}"
    if not (home / "ready").exists():
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--upgrade",
            "--target",
            str(home),
            OLDER,
        ]
        installed = subprocess.run(install, capture_output=True, text=True)
        if installed.returncode != 0:
            pytest.skip(
                f"{OLDER} could not be installed: {installed.stderr.strip().splitlines()[-1:]}"
            )
        (home / "ready").touch()
    env = {"PYTHONPATH": f"{home}{os.pathsep}{requires.REPO}"}
    answer = subprocess.run(
        [sys.executable, "-c", "import huggingface_hub; print(huggingface_hub.__version__)"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == OLDER.partition("==")[2]
    return env


def test_each_generation_publishes_the_same_files(
    server: tuple[RepoSettings, hub.HubState], tmp_path: Path, generation: dict[str, str]
) -> None:
    settings, state = server
    pushed = subprocess.run(
        [sys.executable, "-m", "miner_guard.uploads.push"],
        input=push_request(settings, revision(tmp_path, 50, LARGE), tmp_path),
        env={**os.environ, **generation},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Successfully pushed new model state with tag 1.3.50" in pushed.stdout
    assert pushed.returncode == 0
    assert state.tags.keys() == {"1.3.50"}
    assert look_at(settings).revision == "1.3.50"


@pytest.mark.slow
def test_killed_after_any_request_the_view_is_complete(
    server: tuple[RepoSettings, hub.HubState], tmp_path: Path, generation: dict[str, str]
) -> None:
    """SIGKILLs the publisher at each request in turn, after the Hub has processed it but before it
    answers."""
    settings, state = server
    publish(settings, revision(tmp_path, 1000, LARGE), tmp_path)
    outcomes = []
    # Before 1.0 the library keeps the endpoint that it found at its import.
    env = {**generation, "HF_ENDPOINT": str(settings.endpoint)}
    with publishers(settings, "huggingface_hub.hf_api", tmp_path, env) as publisher:
        for number in range(1, 40):
            before, inner = shown(state, "main"), 1000 + number
            ended = publisher.push_and_kill(state, revision(tmp_path, inner, LARGE), number)
            assert shown(state, "main") in (before, {inner}), (
                f"killed after request {number}, before anybody helped"
            )
            wait_for_the_recovery(open_repo(settings).label, tmp_path)
            assert shown(state, "main") in (before, {inner}), f"killed after request {number}"
            outcomes.append(shown(state, "main") == before)
            if not outcomes[-1]:
                assert shown(state, f"1.3.{inner}") == {inner}, (
                    f"killed after request {number}: no tag"
                )
                assert look_at(settings).revision == f"1.3.{inner}"
            if ended:
                break
        else:
            pytest.fail("the publisher never got to its end")
    # Until the large file is sent, the old revision stays; from the commit's first request on, the
    # new one gets completed.
    assert outcomes[0]
    assert outcomes.index(False) > 2
    assert not any(outcomes[outcomes.index(False) :])
    assert outcomes.count(False) > 3


def shown(state: hub.HubState, revision: str) -> set[int]:
    """The inner steps in the files of a branch or tag: a single one if the revision is complete."""
    expected = state.tags.get(revision)
    files = next(c for c in state.repos[REPO_ID] if expected in (None, c.id)).files
    read = {key: state.contents[digest] for key, digest in files.items()}
    documents = [
        json.loads(read[key])
        for key in ("metadata.json", "epoch-3/metadata.json", "epoch-3/config.json")
    ]
    steps = {d["inner_step"] if "inner_step" in d else d["block_list"][0] for d in documents}
    return steps | {inner_step_of(read["epoch-3/gradients.pt"])}


def test_a_large_file_is_sent_before_the_commit_and_not_again(
    server: tuple[RepoSettings, hub.HubState], tmp_path: Path
) -> None:
    settings, state = server
    publish(settings, revision(tmp_path, 50, LARGE), tmp_path)
    sent = [n for n, asked in enumerate(state.requests) if asked.startswith("PUT /_lfs/")]
    assert len(sent) == 1
    assert sent[0] < next(n for n, asked in enumerate(state.requests) if "/commit/" in asked)


def test_a_cancelled_upload_shows_nothing(
    server: tuple[RepoSettings, hub.HubState], tmp_path: Path
) -> None:
    settings, state = server
    publish(settings, revision(tmp_path, 50, LARGE), tmp_path)
    repo = open_repo(settings)
    publisher = Publisher(repo, Journal(journal_path(tmp_path, repo.label)), lambda _l: None)
    first = len(state.requests)
    state.after = lambda number: (
        publisher.cancelled.set() if "/_lfs/" in state.requests[number - 1] else None
    )
    with pytest.raises(Cancelled, match="the previous publication is unchanged"):
        publisher.publish(revision(tmp_path, 60, LARGE))
    assert len(state.requests) > first
    assert shown(state, "main") == {50}
    assert "1.3.60" not in state.tags
