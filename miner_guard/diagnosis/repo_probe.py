"""Can the repo be read and written? `python -m miner_guard.diagnosis.repo_probe`, a child with a deadline."""

from __future__ import annotations

import os
import socket
from typing import Any

from miner_guard import probe
from miner_guard.config import RepoSettings
from uploads.repos import open_repo
from uploads.repos.base import Repo, RepoError


def look(repo: Repo) -> dict[str, Any]:
    """Read the state; write a small object of our own, read it back, remove it."""
    answer: dict[str, Any] = {"label": repo.label, "read": False, "write": False}
    try:
        repo.state()
        answer["read"] = True
    except RepoError as error:
        answer["read_error"] = str(error)
    key = f"miner-guard-probe-{socket.gethostname()}-{os.getpid()}"
    words = b"written by miner-guard's preflight, removed at once\n"
    try:
        repo.put(key, words)
        try:
            if repo.get(key) != words:
                raise RepoError("the probe object came back with other bytes")
        finally:
            repo.delete(key)
        answer["write"] = True
    except RepoError as error:
        answer["write_error"] = str(error)
    return answer


def main() -> None:
    request = probe.request()
    try:
        probe.reply(look(open_repo(RepoSettings(**request["repo"]))))
    except RepoError as error:
        probe.reply({"label": request["repo"]["kind"], "read_error": str(error), "read": False, "write": False})


if __name__ == "__main__":
    main()
