"""Keys come from where the miner keeps them, and the guard reports missing or unsafe ones without
showing a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from miner_guard.config import RepoSettings
from miner_guard.uploads.repos.base import RepoError
from miner_guard.uploads.repos.credentials import find, first, parse_dotenv

DOTENV = """
# R2
export R2_ACCOUNT_ID=abc123
R2_WRITE_ACCESS_KEY_ID = "key with spaces # and a hash"
R2_WRITE_SECRET_ACCESS_KEY='single $quoted'  # a remark
EMPTY=
not an assignment
PLAIN=value # a remark
"""


def test_a_dotenv_is_read_as_the_miner_reads_it() -> None:
    assert parse_dotenv(DOTENV) == {
        "R2_ACCOUNT_ID": "abc123",
        "R2_WRITE_ACCESS_KEY_ID": "key with spaces # and a hash",
        "R2_WRITE_SECRET_ACCESS_KEY": "single $quoted",
        "EMPTY": "",
        "PLAIN": "value",
    }


def test_a_toml_file_names_the_same_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('r2_account_id = "abc"\nHF_TOKEN = "t"\n')
    keys = find(RepoSettings(credentials="file", credentials_file=str(file)))
    assert (first(keys, "R2_ACCOUNT_ID"), first(keys, "NONE", "HF_TOKEN"), first(keys, "X")) == (
        "abc",
        "t",
        None,
    )


def test_a_broken_file_is_reported_without_its_content(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("R2_SECRET = s3cr3t-without-quotes")
    with pytest.raises(RepoError, match="is not valid TOML") as error:
        find(RepoSettings(credentials="file", credentials_file=str(file)))
    assert "s3cr3t" not in str(error.value)


def test_a_file_that_anybody_can_write_is_refused(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("A=b")
    file.chmod(0o666)
    with pytest.raises(RepoError, match="chmod 600"):
        find(RepoSettings(credentials="dotenv", credentials_file=str(file)))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RepoError, match="nowhere"):
        find(RepoSettings(credentials="dotenv", credentials_file=str(tmp_path / "nowhere")))
    with pytest.raises(RepoError, match=r"requires repo\.credentials_file"):
        find(RepoSettings(credentials="file"))


def test_without_keys_the_missing_names_are_reported() -> None:
    pytest.importorskip("boto3")
    from miner_guard.uploads.repos import open_repo

    with pytest.raises(RepoError, match="the environment has no R2_WRITE_ACCESS_KEY_ID"):
        open_repo(RepoSettings(kind="s3", bucket="b-007"), {})
    with pytest.raises(RepoError, match=r"repo\.bucket is not set"):
        open_repo(RepoSettings(kind="s3"), {})
    with pytest.raises(RepoError, match="write owner/name"):
        open_repo(RepoSettings(kind="hf", repo_id="nameonly"), {})
