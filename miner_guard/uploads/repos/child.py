"""Child process that reads a repo, `python -m miner_guard.uploads.repos.child`: its state and, for
an audit, the gradients that a validator fetches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miner_guard.config import RepoSettings
from miner_guard.system import probe
from miner_guard.uploads.repos import open_repo
from miner_guard.uploads.repos.base import Damaged, RepoError, RepoRefused
from miner_guard.validators.files import Layout


def answer(request: Mapping[str, Any], env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The fields of `Published` for the request's `outer_step` (None: the step that the metadata
    names). If the request names a `folder`, also the `file` there that holds the gradients, unless
    they are missing or larger than `max_bytes`.

    `damaged` instead if no validator can read an object, `refused` if these keys cannot open the
    repo. Raises RepoError if a retry may succeed.
    """
    layout = Layout(**request["layout"])
    try:
        repo = open_repo(RepoSettings(**request["repo"]), env)
        published = repo.state(layout, request["outer_step"])
        # Not asdict: it recurses into documents, which may be nested deeply.
        fields = dict(vars(published))
        size, folder = published.size_bytes, request["folder"]
        if not folder or size is None or size > request["max_bytes"]:
            return fields
        assert published.outer_step is not None
        path = Path(folder) / layout.file
        repo.save(layout.gradients_of(published.outer_step), path, limit=max(size, 1))
    except Damaged as damage:
        return {"damaged": str(damage)}
    except RepoRefused as refusal:
        return {"refused": str(refusal)}
    return {**fields, "file": str(path)}


def main() -> None:
    """Read one request and write its `answer`."""
    try:
        probe.reply(answer(probe.request()))
    except RepoError as error:
        probe.reply(error=str(error))


if __name__ == "__main__":
    main()
