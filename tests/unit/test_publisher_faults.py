"""Storages that do less than they should: no list of parts, stale reads, keys that expire."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miner_guard.uploads.journal import Journal, journal_path
from miner_guard.uploads.publisher import Publisher, PublishError, Retry
from miner_guard.uploads.repos.base import Missing, RepoError, RepoRefused
from miner_guard.uploads.repos.local import LocalRepo
from miner_guard.uploads.repos.s3 import S3Repo
from miner_guard.uploads.repos.s3_errors import translated
from tests.servers.revisions import revision

QUICK = Retry(backoff_s=0.001)


def publisher(repo: Any, folder: Path) -> Publisher:
    return Publisher(repo, Journal(journal_path(folder, repo.label)), lambda _line: None, QUICK)


def answer(code: str, status: int) -> Exception:
    error: Any = RuntimeError(code)
    error.response = {
        "Error": {"Code": code, "Message": code},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("code", "status"), [("NotImplemented", 501), ("AccessDenied", 403), ("InvalidRequest", 400)]
)
def test_an_upload_whose_parts_are_unlisted_begins_again(
    monkeypatch: pytest.MonkeyPatch, code: str, status: int
) -> None:
    """A single 503 must not make a tag unpublishable: from then on, the publisher would always ask
    first for a list of its parts, which the server does not have."""
    repo = object.__new__(S3Repo)

    def call(_method: Any, **_given: Any) -> Any:
        raise translated(answer(code, status), "bucket")

    monkeypatch.setattr(repo, "_call", call, raising=False)
    monkeypatch.setattr(repo, "_client", SimpleNamespace(list_parts=None), raising=False)
    notes = {"multipart": {"id": "u1", "part_bytes": 5, "checked": False}}
    assert repo._begun("key", notes, 5) == (None, {})


def test_a_server_that_is_busy_is_asked_for_the_parts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repo = object.__new__(S3Repo)

    def call(_method: Any, **_given: Any) -> Any:
        raise translated(answer("SlowDown", 503), "bucket")

    monkeypatch.setattr(repo, "_call", call, raising=False)
    monkeypatch.setattr(repo, "_client", SimpleNamespace(list_parts=None), raising=False)
    with pytest.raises(RepoError) as failed:
        repo._begun("key", {"multipart": {"id": "u1", "part_bytes": 5, "checked": False}}, 5)
    assert failed.value.transient


class Behind(LocalRepo):
    """Shows the earlier state for the first few reads."""

    looks = 2

    def confirm(self, ticket: Any) -> Any:
        if self.looks:
            self.looks -= 1
            raise Missing(f"{ticket.key} does not exist")
        return super().confirm(ticket)


def test_a_read_that_is_behind_the_write_is_repeated_before_it_counts(tmp_path: Path) -> None:
    """`publish again` must not follow an upload that has arrived."""
    repo = Behind(tmp_path / "repo")
    result = publisher(repo, tmp_path).publish(revision(tmp_path, 50))
    assert result.tag.endswith(".50")
    repo.looks = 99
    with pytest.raises(PublishError, match="does not exist"):
        publisher(repo, tmp_path).publish(revision(tmp_path, 55))


def test_keys_that_end_while_a_revision_is_shown_leave_no_word_of_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = LocalRepo(tmp_path / "repo")
    publisher(repo, tmp_path).publish(revision(tmp_path, 50))

    def refuse(*_: Any) -> None:
        raise RepoRefused("the storage rejected the keys for bucket b (ExpiredToken)")

    monkeypatch.setattr(repo, "commit", refuse)
    with pytest.raises(PublishError, match="may be a mix of two revisions; publish again"):
        publisher(repo, tmp_path).publish(revision(tmp_path, 55))


@pytest.mark.parametrize("code", ["QuotaExceeded", "InsufficientCapacity"])
def test_a_full_storage_is_not_blamed_on_the_keys(code: str) -> None:
    words = str(translated(answer(code, 403), "b"))
    assert "is full or over its quota" in words
    assert "keys" not in words
