"""Child process that reads a repo, `python -m miner_guard.uploads.repos.child`: its state and, for
an audit, the gradients that a validator fetches."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from miner_guard.config import RepoSettings
from miner_guard.system import probe
from miner_guard.uploads.repos import Fetch, open_repo
from miner_guard.uploads.repos.base import (
    DOCUMENT_LIMIT,
    Damaged,
    Missing,
    Repo,
    RepoError,
    RepoRefused,
)
from miner_guard.validators.facts import METADATA, config_key, gradients_key


def answer(repo: Repo, fetch: Fetch) -> dict[str, Any]:
    """The fields of `Published` for the epoch to fetch. If `fetch` names a folder, also the
    `objects` saved there, by key: documents, and the gradients unless they are too large.

    `damaged` instead if no validator can read an object, `refused` if these keys cannot open the
    repo. Raises RepoError if a retry may succeed.
    """
    try:
        published = repo.state(fetch.outer_step)
        # Not asdict: it recurses into documents, which may be nested deeply.
        fields, size, outer = dict(vars(published)), published.size_bytes, published.outer_step
        if not fetch.folder or outer is None:
            return fields
        objects = {}
        wanted = {METADATA: DOCUMENT_LIMIT, config_key(outer): DOCUMENT_LIMIT}
        if size is not None and size <= fetch.max_bytes:
            wanted[gradients_key(outer)] = max(size, 1)
        for key, limit in wanted.items():
            path = Path(fetch.folder, key.rpartition("/")[2])
            with contextlib.suppress(Missing):
                repo.save(key, path, limit)
                objects[key] = str(path)
    except Damaged as damage:
        return {"damaged": str(damage)}
    except RepoRefused as refusal:
        return {"refused": str(refusal)}
    return {**fields, "objects": objects}


def main() -> None:
    """Read one request and write its `answer`."""
    request = probe.request()
    try:
        repo = open_repo(RepoSettings(**request["repo"]))
        probe.reply(answer(repo, Fetch(**request["fetch"])))
    except RepoRefused as refusal:
        probe.reply({"refused": str(refusal)})
    except RepoError as error:
        probe.reply(error=str(error))


if __name__ == "__main__":
    main()
