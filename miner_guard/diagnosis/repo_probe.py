"""Checks whether the repo can be read and written, in a child process with a deadline.

Run as `python -m miner_guard.diagnosis.repo_probe`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from miner_guard.config import RepoSettings
from miner_guard.system import probe
from miner_guard.uploads.repos import open_repo
from miner_guard.uploads.repos.base import Repo, RepoError
from miner_guard.uploads.repos.credentials import find, first

_NEEDED: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "s3": (
        ("R2_WRITE_ACCESS_KEY_ID", "AWS_ACCESS_KEY_ID"),
        ("R2_WRITE_SECRET_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY"),
    ),
    "hf": (("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),),
}
"""The keys needed for writing: a miner cannot publish with only a read key."""


def examine(repo: Repo) -> dict[str, Any]:
    """Read the state; write a small object, read it back and delete it."""
    answer: dict[str, Any] = {"label": repo.label, "read": False, "write": False}
    try:
        repo.state()
        answer["read"] = True
    except RepoError as error:
        answer["read_error"] = str(error)
    key = f"miner-guard-probe-{socket.gethostname()}-{os.getpid()}"
    words = b"written by miner-guard's preflight, removed immediately\n"
    try:
        repo.put(key, words)
        try:
            if repo.get(key) != words:
                raise RepoError("the probe object came back with different bytes")
        finally:
            repo.delete(key)
        answer["write"] = True
    except RepoError as error:
        answer["write_error"] = str(error)
    return answer


def missing_credentials(
    settings: RepoSettings, env: Mapping[str, str] | None = None
) -> list[str] | None:
    """Return the credentials that are missing for publishing, under the miner's names for them;
    None if this kind of repo needs no credentials.

    Raises RepoError if the credentials file can't be used.
    """
    needed = _NEEDED.get(settings.kind)
    if needed is None:
        return None
    keys = find(settings, env)
    return [" or ".join(names) for names in needed if first(keys, *names) is None]


def main() -> None:
    settings = RepoSettings(**probe.request()["repo"])
    answer: dict[str, Any] = {"label": settings.kind, "read": False, "write": False}
    try:
        answer["credentials"] = missing_credentials(settings)
        answer |= examine(open_repo(settings))
    except RepoError as error:
        answer["read_error"] = str(error)
    probe.reply(answer)


if __name__ == "__main__":
    main()
