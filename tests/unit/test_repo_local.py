"""A local directory as a repo, probed the way the supervisor does it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from miner_guard.config import RepoSettings
from miner_guard.uploads.journal import Journal
from miner_guard.uploads.publisher import Publisher, PublishError, Revision
from miner_guard.uploads.push import push
from miner_guard.uploads.repos import look_at
from miner_guard.uploads.repos.base import (
    CONFIG,
    GRADIENTS,
    METADATA,
    RepoError,
    StagedObject,
    epoch_key,
)
from miner_guard.uploads.repos.local import LocalRepo


def publish(repo: LocalRepo, folder: Path, outer: int, inner: int) -> list[StagedObject]:
    files = {
        epoch_key(outer, "gradients.pt"): f"gradients of {inner}",
        epoch_key(outer, "config.json"): json.dumps({"block_list": [inner]}),
        METADATA: json.dumps({"run": 5, "outer_step": outer, "inner_step": inner, "peer_id": "p"}),
    }
    tickets = []
    for number, (key, text) in enumerate(files.items()):
        path = folder / f"{inner}-{number}"
        path.write_text(text)
        tickets.append(repo.stage(key, path, lambda _n: None, {}))
    return tickets


def test_staged_is_unseen_and_committed_is_whole(tmp_path: Path) -> None:
    repo = LocalRepo(tmp_path / "repo")
    assert look_at(RepoSettings(kind="local", path=str(tmp_path / "repo"))).empty
    repo.commit(publish(repo, tmp_path, 3, 50), "5.3.50")
    tickets = publish(repo, tmp_path, 3, 60)
    assert repo.state().inner_step == 50
    repo.commit(tickets, "5.3.60")
    repo.commit(tickets, "5.3.60")
    seen = look_at(RepoSettings(kind="local", path=str(tmp_path / "repo")))
    assert (seen.revision, seen.config, seen.reason) == ("5.3.60", {"block_list": [60]}, None)
    assert seen.age_s is not None
    assert seen.age_s < 60
    assert all(repo.confirm(t).checksum == t.checksum for t in tickets)


def test_age_is_the_age_of_the_gradients(tmp_path: Path) -> None:
    repo = LocalRepo(tmp_path, wall=lambda: 10_000.0)
    repo.commit(publish(repo, tmp_path, 1, 50), "5.1.50")
    os.utime(tmp_path / "epoch-1" / "gradients.pt", (7_000, 7_000))
    assert repo.state().age_s == 3000.0


def test_files_of_the_future_have_no_age(tmp_path: Path) -> None:
    """When a clock was set back, the repo once looked newly published until the clock had caught
    up."""
    LocalRepo(tmp_path).commit(publish(LocalRepo(tmp_path), tmp_path, 1, 50), "5.1.50")
    os.utime(tmp_path / "epoch-1" / "gradients.pt", (7_000, 7_000))
    assert LocalRepo(tmp_path, wall=lambda: 6_999.0).state().age_s == 0.0
    with pytest.raises(
        RepoError, match="has a modification time 3400 s in the future; was the clock set back"
    ):
        LocalRepo(tmp_path, wall=lambda: 3_600.0).state()


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "metadata.json is not JSON"), ("[]", "metadata.json is not a JSON object")],
)
def test_a_torn_pointer_is_unknown_not_a_crash(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / METADATA).write_text(text)
    seen = look_at(RepoSettings(kind="local", path=str(tmp_path)))
    assert seen.age_s is None
    assert words in str(seen.reason)


def test_what_changed_after_the_commit_is_reported(tmp_path: Path) -> None:
    repo = LocalRepo(tmp_path / "repo")
    tickets = publish(repo, tmp_path, 1, 50)
    repo.commit(tickets, "5.1.50")
    (tmp_path / "repo" / "epoch-1" / "gradients.pt").write_text("other")
    with pytest.raises(RepoError, match=r"epoch-1/gradients\.pt reads back as 5 bytes"):
        repo.confirm(tickets[0])


def test_leftovers_of_a_dead_publisher_are_swept(tmp_path: Path) -> None:
    repo = LocalRepo(tmp_path / "repo")
    dead = publish(repo, tmp_path, 1, 50)
    assert repo.sweep() == len(dead)
    repo.commit(publish(repo, tmp_path, 1, 60), "5.1.60")
    assert repo.state().inner_step == 60


def test_a_key_never_leaves_the_folder(tmp_path: Path) -> None:
    with pytest.raises(RepoError, match="outside the repo"):
        LocalRepo(tmp_path / "repo").put("../elsewhere", b"x")


def test_a_repo_that_was_never_created_is_reported(tmp_path: Path) -> None:
    assert "repo.path is not set" in str(look_at(RepoSettings(kind="local")).reason)
    assert "no repo is configured" in str(look_at(RepoSettings()).reason)


def a_revision(folder: Path) -> Revision:
    for name in (GRADIENTS, CONFIG, METADATA):
        (folder / name).write_text("{}")
    return Revision(folder, 5, 56, 51)


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_a_journal_that_cannot_be_written_fails_the_upload_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """A full disk must not end the publisher with a traceback."""
    revision, whole, writes = a_revision(tmp_path), os.replace, 0

    def full(source: Path, target: Path) -> None:
        nonlocal writes
        writes += target.parent == tmp_path / "journal"
        if writes > failing:
            raise OSError(errno.ENOSPC, "No space left on device", str(source))
        whole(source, target)

    monkeypatch.setattr(os, "replace", full)
    repo = LocalRepo(tmp_path / "repo")
    publisher = Publisher(repo, Journal(tmp_path / "journal" / "j.json"), lambda _line: None)
    if failing < 2:
        with pytest.raises(PublishError, match="No space left on device"):
            publisher.publish(revision)
        assert repo.state().empty
    monkeypatch.setattr(os, "replace", whole)
    assert publisher.publish(revision).tag == "5.56.51"


def test_a_publisher_that_ends_unread_is_an_upload_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miner_guard.uploads.push.own_module", lambda _name: ["/bin/true"])
    folder = tmp_path / ("x" * 100_000)
    with pytest.raises(PublishError, match="exited with 0 without returning a result"):
        push(
            RepoSettings(kind="local", path=str(tmp_path)),
            Revision(tmp_path, 5, 56, 51),
            folder,
            print,
        )
