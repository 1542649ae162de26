"""Repos: a local folder as the supervisor probes it, and the miner's keys."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from miner_guard.config import RepoSettings
from miner_guard.uploads.repos import look_at
from miner_guard.uploads.repos.base import RepoError
from miner_guard.uploads.repos.credentials import find
from miner_guard.uploads.repos.local import LocalRepo
from miner_guard.validators.facts import METADATA


def publish(root: Path, outer: int, inner: int) -> None:
    epoch = root / f"epoch-{outer}"
    epoch.mkdir(parents=True)
    (epoch / "gradients.pt").write_text(f"gradients of {inner}")
    (epoch / "config.json").write_text(json.dumps({"block_list": [inner]}))
    metadata = {"run": 5, "outer_step": outer, "inner_step": inner, "peer_id": "p"}
    (root / METADATA).write_text(json.dumps(metadata))


def test_a_pointer_to_missing_gradients_says_so(tmp_path: Path) -> None:
    publish(tmp_path, 3, 60)
    (tmp_path / "epoch-3" / "gradients.pt").unlink()
    reason = LocalRepo(tmp_path).state().reason
    assert reason == "metadata.json points to outer step 3, which has no gradients.pt"


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
    seen = look_at(RepoSettings(kind="local", path=str(tmp_path))).published
    assert seen.age_s is None
    assert words in str(seen.reason)


def test_a_key_never_leaves_the_folder(tmp_path: Path) -> None:
    with pytest.raises(RepoError, match="outside the repo"):
        LocalRepo(tmp_path / "repo").get("../elsewhere")


# keys

DOTENV = """
# R2
export R2_ACCOUNT_ID=abc123
R2_WRITE_ACCESS_KEY_ID = "key with spaces # and a hash"
R2_WRITE_SECRET_ACCESS_KEY='single $quoted'  # a remark
EMPTY=
not an assignment
PLAIN=value # a remark
"""


def test_a_dotenv_is_read_as_the_miner_reads_it(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text(DOTENV)
    assert find(RepoSettings(credentials="dotenv", credentials_file=str(file))) == {
        "R2_ACCOUNT_ID": "abc123",
        "R2_WRITE_ACCESS_KEY_ID": "key with spaces # and a hash",
        "R2_WRITE_SECRET_ACCESS_KEY": "single $quoted",
        "EMPTY": "",
        "PLAIN": "value",
    }


@pytest.mark.parametrize(
    ("kind", "text", "mode", "words"),
    [
        ("file", "R2_SECRET = s3cr3t-without-quotes", 0o600, "is not valid TOML"),
        ("dotenv", "A=s3cr3t", 0o666, "chmod 600"),
        ("dotenv", None, 0o600, "keys cannot be read"),
    ],
)
def test_a_key_file_that_cannot_be_used_is_reported_without_its_content(
    tmp_path: Path, kind: Any, text: str | None, mode: int, words: str
) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(RepoError, match=words) as error:
        find(RepoSettings(credentials=kind, credentials_file=str(file)))
    assert "s3cr3t" not in str(error.value)


def test_without_keys_the_missing_names_are_reported() -> None:
    pytest.importorskip("boto3")
    from miner_guard.uploads.repos import open_repo

    with pytest.raises(RepoError, match="the environment has no R2_WRITE_ACCESS_KEY_ID"):
        open_repo(RepoSettings(kind="s3", bucket="b-007"), {})
    with pytest.raises(RepoError, match=r"requires repo\.credentials_file"):
        find(RepoSettings(credentials="file"))
    with pytest.raises(RepoError, match=r"repo\.bucket is not set"):
        open_repo(RepoSettings(kind="s3"), {})
    with pytest.raises(RepoError, match="write owner/name"):
        open_repo(RepoSettings(kind="hf", repo_id="nameonly"), {})
