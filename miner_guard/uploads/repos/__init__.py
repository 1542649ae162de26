"""The repos a miner publishes to, and how the supervisor probes them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from miner_guard.config import RepoSettings
from miner_guard.record.status_document import NO_REPO
from miner_guard.system import probe
from miner_guard.uploads.repos.base import Repo, RepoError
from miner_guard.validators.facts import Published
from miner_guard.validators.files import USUAL, Layout


def open_repo(settings: RepoSettings, env: Mapping[str, str] | None = None) -> Repo:
    """The repo named in the settings; opens no connection. Raises RepoError for missing settings or
    keys.

    For child processes: it imports the client library, and the repo's methods may block. `env`
    supplies the keys (default: the process environment).
    """
    if settings.kind == "local":
        if not settings.path:
            raise RepoError("repo.path is not set; set it to the folder to publish to")
        from pathlib import Path

        from miner_guard.uploads.repos.local import LocalRepo

        return LocalRepo(Path(settings.path))
    if settings.kind == "s3":
        from miner_guard.uploads.repos.s3 import open_s3

        return open_s3(settings, env)
    if settings.kind == "hf":
        from miner_guard.uploads.repos.hub import open_hub

        return open_hub(settings, env)
    raise RepoError(f"repo.kind = {settings.kind!r} is not supported; set it to local, s3 or hf")


def look_at(settings: RepoSettings, layout: Layout = USUAL) -> Published:
    """The currently published state, probed in a child with a deadline of `settings.timeout_s`.
    Never raises, never hangs."""
    if settings.kind == "none":
        return Published(reason=NO_REPO)
    request = {"repo": dataclasses.asdict(settings), "layout": dataclasses.asdict(layout)}
    answer = probe.ask("miner_guard.uploads.repos.child", request, settings.timeout_s)
    if answer.reason is not None or answer.value is None:
        reason = answer.reason or "the probe returned no answer"
        return Published(reason=reason, seen_at=time.time())
    return published_from_dict(answer.value)


def published_from_dict(value: Mapping[str, Any]) -> Published:
    """`Published` from its fields; ignores unknown ones."""
    return Published(
        **{f.name: value[f.name] for f in dataclasses.fields(Published) if f.name in value}
    )
