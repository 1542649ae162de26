"""The repos a miner publishes to, and how the supervisor probes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miner_guard.config import RepoSettings
from miner_guard.record.status_document import NO_REPO
from miner_guard.system import probe
from miner_guard.uploads.repos.base import TIMEOUT_S, Repo, RepoError
from miner_guard.validators.facts import Published


def open_repo(settings: RepoSettings, env: Mapping[str, str] | None = None) -> Repo:
    """The repo named in the settings; opens no connection. Raises RepoError for missing settings or
    keys.

    For child processes: it imports the client library, and the repo's methods may block. `env`
    supplies the keys (default: the process environment).
    """
    if settings.kind == "local":
        if not settings.path:
            raise RepoError("repo.path is not set; set it to the folder to publish to")
        from miner_guard.uploads.repos.local import LocalRepo

        return LocalRepo(Path(settings.path))
    if settings.kind == "s3":
        from miner_guard.uploads.repos.s3 import open_s3

        return open_s3(settings, env)
    if settings.kind == "hf":
        from miner_guard.uploads.repos.hub import open_hub

        return open_hub(settings, env)
    raise RepoError(f"repo.kind = {settings.kind!r} is not supported; set it to local, s3 or hf")


@dataclasses.dataclass(frozen=True)
class Fetch:
    """What an audit fetches, beyond looking."""

    outer_step: int | None
    """The epoch that validators score; None: the one that the metadata names."""

    folder: str
    """Where to save the gradients."""

    max_bytes: int
    """Leave larger gradients where they are."""


@dataclasses.dataclass(frozen=True)
class Look:
    """The published state, as a child with a deadline saw it."""

    published: Published
    damaged: str | None = None
    """Why no validator can read what is published."""

    refused: str | None = None
    """Why the storage rejects these keys."""

    objects: dict[str, Path] = dataclasses.field(default_factory=dict)
    """The fetched files, by key."""

    @classmethod
    def of(cls, fields: dict[str, Any], reason: str | None = None) -> Look:
        """A child's answer as a look."""
        damaged, refused = fields.pop("damaged", None), fields.pop("refused", None)
        objects = {key: Path(path) for key, path in fields.pop("objects", {}).items()}
        if reason := reason or damaged or refused:
            return cls(Published(reason=reason), damaged, refused)
        if not fields:
            return cls(Published(reason="the probe returned no answer"))
        return cls(Published(**fields), objects=objects)


def look_at(
    settings: RepoSettings,
    *,
    fetch: Fetch | None = None,
    deadline_s: float | None = None,
    env: Mapping[str, str] | None = None,
) -> Look:
    """Probe the repo in a child with a deadline (default: `TIMEOUT_S`). Never raises,
    never hangs."""
    if settings.kind == "none":
        return Look(Published(reason=NO_REPO))
    request: dict[str, Any] = {
        "repo": dataclasses.asdict(settings),
        "fetch": dataclasses.asdict(fetch or Fetch(None, "", 0)),
    }
    answer = probe.ask("miner_guard.uploads.repos.child", request, deadline_s or TIMEOUT_S, env=env)
    return Look.of(answer.value if isinstance(answer.value, dict) else {}, answer.reason)
