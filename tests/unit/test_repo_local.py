"""A local directory as a repo, probed the way the supervisor does it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from miner_guard.config import RepoSettings
from miner_guard.uploads.repos import look_at
from miner_guard.uploads.repos.base import METADATA, RepoError
from miner_guard.uploads.repos.local import LocalRepo


def publish(root: Path, outer: int, inner: int) -> None:
    epoch = root / f"epoch-{outer}"
    epoch.mkdir(parents=True)
    (epoch / "gradients.pt").write_text(f"gradients of {inner}")
    (epoch / "config.json").write_text(json.dumps({"block_list": [inner]}))
    metadata = {"run": 5, "outer_step": outer, "inner_step": inner, "peer_id": "p"}
    (root / METADATA).write_text(json.dumps(metadata))


def test_published_is_what_a_validator_finds(tmp_path: Path) -> None:
    settings = RepoSettings(kind="local", path=str(tmp_path / "repo"))
    assert look_at(settings).empty
    publish(tmp_path / "repo", 3, 60)
    found = look_at(settings)
    assert (found.revision, found.config, found.reason) == ("5.3.60", {"block_list": [60]}, None)
    assert found.age_s is not None
    assert found.age_s < 60


def test_age_is_the_age_of_the_gradients(tmp_path: Path) -> None:
    repo = LocalRepo(tmp_path, wall=lambda: 10_000.0)
    publish(tmp_path, 1, 50)
    os.utime(tmp_path / "epoch-1" / "gradients.pt", (7_000, 7_000))
    assert repo.state().age_s == 3000.0


def test_files_of_the_future_have_no_age(tmp_path: Path) -> None:
    """When a clock was set back, the repo once looked newly published until the clock had caught
    up."""
    publish(tmp_path, 1, 50)
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


def test_a_key_never_leaves_the_folder(tmp_path: Path) -> None:
    with pytest.raises(RepoError, match="outside the repo"):
        LocalRepo(tmp_path / "repo").put("../elsewhere", b"x")


def test_a_repo_that_was_never_created_is_reported(tmp_path: Path) -> None:
    assert "repo.path is not set" in str(look_at(RepoSettings(kind="local")).reason)
    assert "no repo is configured" in str(look_at(RepoSettings()).reason)
