"""Child process that reads a repo, `python -m miner_guard.uploads.repos.child`: its state, or the
files that a validator fetches, for an audit."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miner_guard.config import RepoSettings
from miner_guard.system import probe
from miner_guard.uploads.repos import open_repo
from miner_guard.uploads.repos.base import (
    LOOK_AGAIN_S,
    LOOKS,
    Damaged,
    Missing,
    ObjectInfo,
    Repo,
    RepoError,
    RepoRefused,
    RepoUnreadable,
    parsed,
)
from miner_guard.validators.files import Layout, filled, mixed
from miner_guard.validators.rules import reduced_config


def fetch(repo: Repo, request: dict[str, Any]) -> dict[str, Any]:
    """Fetch `metadata.json`, the epoch's `config.json` and `gradients.pt`; save the last under
    `folder`.

    Raises RepoError, or Damaged for a document that validators cannot read either.

    If the request has no outer step, the metadata provides it. Skips a gradients.pt that is larger
    than `max_bytes` or `known` (same key, size and checksum).
    """
    for number in range(LOOKS):
        # The storage may briefly return the state from before the last write.
        time.sleep(LOOK_AGAIN_S if number else 0.0)
        answer, entry = _looked(repo, request)
        metadata = answer["metadata"] or {}
        if entry is None or metadata.get("outer_step") != answer["outer_step"]:
            break
        if mixed(metadata, entry.size_bytes, entry.checksum) is None:
            break
    max_bytes = request["max_bytes"]
    if entry is not None and request.get("known") == _identity(entry):
        return {**answer, "file": None, "unchanged": True}
    if entry is None or (max_bytes is not None and entry.size_bytes > max_bytes):
        return {**answer, "file": None}
    path = Path(request["folder"]) / "gradients.pt"
    repo.save(entry.key, path, limit=max(entry.size_bytes, 1))
    return {
        **answer,
        "file": str(path),
        "fetched_bytes": answer["fetched_bytes"] + entry.size_bytes,
    }


def _identity(entry: ObjectInfo) -> dict[str, Any]:
    return {"key": entry.key, "size_bytes": entry.size_bytes, "checksum": entry.checksum}


def _looked(repo: Repo, request: dict[str, Any]) -> tuple[dict[str, Any], ObjectInfo | None]:
    """Return the answer without the gradients' bytes, and the entry of the gradients file if it
    exists."""
    layout = Layout(**request["layout"])
    metadata, size = _document(repo, layout.metadata)
    outer = request["outer_step"]
    outer = outer if outer is not None else (metadata or {}).get("outer_step")
    if outer is None:
        return {"metadata": metadata, "outer_step": None, "fetched_bytes": size}, None
    names = {**request["names"], "outer_step": outer}
    config, more = _document(repo, filled(layout.config, names))
    gradients = layout.gradients.format(**names)
    try:
        entry = _newest(repo, gradients)
    except RepoUnreadable as refusal:
        raise Damaged(f"{gradients}: {refusal}") from refusal
    answer = {
        "metadata": metadata,
        "config": _read_of(config, names.get("uid")),
        "outer_step": outer,
        "fetched_bytes": size + more,
    }
    if entry is None:
        return {**answer, "empty": True, "key": gradients}, None
    answer |= {
        "key": entry.key,
        "age_s": entry.age_s,
        "size_bytes": entry.size_bytes,
        "checksum": entry.checksum,
    }
    return answer, entry


def _document(repo: Repo, key: str | None) -> tuple[dict[str, Any] | None, int]:
    if key is None:
        return None, 0
    try:
        data = repo.get(key)
    except Missing:
        return None, 0
    except RepoUnreadable as refusal:
        raise Damaged(f"{key}: {refusal}") from refusal
    return parsed(key, data), len(data)


def _read_of(config: dict[str, Any] | None, uid: int | None) -> dict[str, Any] | None:
    """Keep only the fields of config.json that the audit reads: a block list may be long."""
    brief = reduced_config(config, uid)
    if config is None or brief is None:
        return None
    return {**brief, "last_allreduce_block": config.get("last_allreduce_block")}


def _newest(repo: Repo, key: str) -> ObjectInfo | None:
    try:
        return repo.head(key)
    except Missing:
        return None


def answer(request: dict[str, Any], env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The fields of `Published`; for a request with a `folder`, the result of `fetch`, or `damaged`
    if no validator can read a document, `refused` if these keys cannot open the bucket.

    Raises RepoError if a retry may succeed.
    """
    settings = RepoSettings(**request["repo"])
    if "folder" not in request:
        return dataclasses.asdict(open_repo(settings, env).state(Layout(**request["layout"])))
    try:
        return fetch(open_repo(settings, env), request)
    except Damaged as damage:
        return {"damaged": str(damage)}
    except RepoRefused as refusal:
        return {"refused": str(refusal)}


def main() -> None:
    """Read one request and write its `answer`."""
    try:
        probe.reply(answer(probe.request()))
    except RepoError as error:
        probe.reply(error=str(error))


if __name__ == "__main__":
    main()
