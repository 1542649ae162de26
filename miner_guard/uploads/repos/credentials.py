"""A repo's keys, from where the miner keeps them: environment, `.env`, or a TOML file. Never a
command line."""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from miner_guard.config import RepoSettings
from miner_guard.uploads.repos.base import RepoError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def find(settings: RepoSettings, env: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """Variables by name, from the source that `settings.credentials` selects. Raises RepoError for
    an unusable file."""
    if settings.credentials == "env":
        return os.environ if env is None else env
    path = Path(settings.credentials_file or (".env" if settings.credentials == "dotenv" else ""))
    if not path.name:
        raise RepoError(
            "repo.credentials = 'file' requires repo.credentials_file, a TOML file with the keys"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RepoError(
            f"the key file {path} cannot be read: {error}; see repo.credentials_file"
        ) from error
    _refuse_open_file(path)
    if settings.credentials != "dotenv":
        return _parse_toml(path, text)
    # Late: only a guard that reads such a file needs it.
    from dotenv import dotenv_values

    values = dotenv_values(stream=io.StringIO(text), interpolate=False)
    return {name: value for name, value in values.items() if value is not None}


def problem(settings: RepoSettings) -> str | None:
    """Return why the key file is unusable; None if it is fine or the keys come from the
    environment."""
    try:
        find(settings)
    except RepoError as error:
        return str(error)
    return None


def beside(env: Mapping[str, str], settings: RepoSettings) -> Mapping[str, str]:
    """`env` plus the variables in the key file: all the secrets that a miner might print. Never
    raises."""
    try:
        return {**find(settings, env), **env}
    except RepoError:
        # Opening the repo reports what is wrong with the file.
        return env


def first(keys: Mapping[str, str], *names: str) -> str | None:
    """Value of the first of `names` that is set and non-empty."""
    return next((keys[name] for name in names if keys.get(name)), None)


def address(settings: RepoSettings, keys: Mapping[str, str]) -> str | None:
    """The storage's URL: the setting, else what the keys name, else the Hub; None for AWS, where
    boto3 knows the region's."""
    if settings.endpoint:
        return settings.endpoint
    if settings.kind == "hf":
        return first(keys, "HF_ENDPOINT") or "https://huggingface.co"
    if account := first(keys, "R2_ACCOUNT_ID"):
        return f"https://{account}.r2.cloudflarestorage.com"
    return first(keys, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


def _parse_toml(path: Path, text: str) -> dict[str, str]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # Hide the parser's message: it may quote the line, and the line is a key.
        raise RepoError(
            f'the key file {path} is not valid TOML; write NAME = "value" lines'
        ) from error
    return {name.upper(): value for name, value in document.items() if isinstance(value, str)}


def _refuse_open_file(path: Path) -> None:
    if path.stat().st_mode & stat.S_IWOTH:
        raise RepoError(f"the key file {path} is world-writable; chmod 600 it")
