"""A Hugging Face model repo. Creating a repo imports huggingface_hub; importing this module does
not."""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from miner_guard.config import RepoSettings, optional_deps
from miner_guard.uploads.repos.base import (
    BLOCK_BYTES,
    FETCHED_PREFIX,
    TIMEOUT_S,
    Missing,
    ObjectInfo,
    Repo,
    RepoError,
    first_line,
    server_time,
)
from miner_guard.uploads.repos.credentials import address, find, first
from miner_guard.validators.facts import Published

_BRANCH = "main"


class HubRepo(Repo):
    """One model repo, read at one revision."""

    def __init__(self, api: Any, repo_id: str, *, endpoint: str, timeout_s: float) -> None:
        self._api = api
        self._repo_id = repo_id
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._revision = _BRANCH

    @property
    def label(self) -> str:
        return f"repo:{self._repo_id}"

    def state(self, outer_step: int | None = None) -> Published:
        try:
            commit = self._guarded(
                lambda: self._api.repo_info(
                    self._repo_id, revision=self._revision, timeout=self._timeout_s
                )
            ).sha
        except Missing:
            return Published(reason=None, empty=True)
        # Pin every request to this commit: another may land between two requests.
        pinned = copy.copy(self)
        pinned._revision = commit
        return Repo.state(pinned, outer_step)

    def head(self, key: str) -> ObjectInfo:
        paths = self._guarded(
            lambda: self._api.get_paths_info(
                self._repo_id, [key], expand=True, revision=self._revision
            )
        )
        if not paths:
            raise Missing(f"repo {self._repo_id} has no such file")
        file = paths[0]
        # The last commit that changed this file: a README commit must not make gradients look
        # fresh.
        age_s = self._guarded(self._now) - file.last_commit.date.timestamp()
        checksum = file.blob_id if file.lfs is None else file.lfs.sha256
        return ObjectInfo(key, file.size, max(0.0, age_s), checksum)

    def _now(self) -> float:
        request = urllib.request.Request(self._endpoint, method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                headers = answer.headers
        except urllib.error.HTTPError as refusal:
            headers = refusal.headers
        return server_time(headers.get("Date"), "the Hub")

    def read(self, key: str, limit: int) -> Iterator[bytes]:
        with tempfile.TemporaryDirectory(prefix=FETCHED_PREFIX) as folder:
            path = self._guarded(
                lambda: self._api.hf_hub_download(
                    self._repo_id, key, revision=self._revision, local_dir=folder
                )
            )
            with open(path, "rb") as file:
                while block := file.read(BLOCK_BYTES):
                    yield block

    def _translated(self, error: Exception) -> RepoError:
        """Translate an exception by its status and class name, because different library versions
        define the classes in different modules."""
        kinds = {kind.__name__ for kind in type(error).__mro__}
        status = getattr(getattr(error, "response", None), "status_code", None)
        # If the server does not answer, the library complains that the file is not in its cache.
        silent = "LocalEntryNotFoundError" in kinds
        if kinds & {"EntryNotFoundError", "RevisionNotFoundError"} and not silent:
            return Missing(f"repo {self._repo_id} has no such file")
        if status in (401, 403) or "GatedRepoError" in kinds:
            return RepoError(
                f"the Hub rejected the token for {self._repo_id} ({status}); check HF_TOKEN and "
                "its write permission"
            )
        if "RepositoryNotFoundError" in kinds or status == 404:
            return Missing(f"repo {self._repo_id} does not exist, or the token has no access to it")
        if status in (408, 409, 412, 429, 500, 502, 503, 504):
            return RepoError(f"the Hub is busy ({status})")
        network = {"TransportError", "ConnectionError", "Timeout", "HTTPException"}
        if status is None and (silent or kinds & network or isinstance(error, OSError)):
            return RepoError(f"no response from the Hub for {self._repo_id}: {first_line(error)}")
        return RepoError(f"repo {self._repo_id}: {type(error).__name__}: {first_line(error)}")


def open_hub(settings: RepoSettings, env: Mapping[str, str] | None = None) -> HubRepo:
    """The repo named in the settings. Raises RepoError if a setting or the library is missing."""
    keys = find(settings, env)
    endpoint = str(address(settings, keys))
    if "huggingface_hub" not in sys.modules:
        # Before 1.0, huggingface_hub parses the Hub's responses using the endpoint it found at
        # import, ignoring HfApi's.
        os.environ["HF_ENDPOINT"] = endpoint
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise RepoError(
            f"the Hub needs huggingface_hub: {optional_deps.install('hf')} ({error})"
        ) from error
    if not settings.repo_id or "/" not in settings.repo_id:
        raise RepoError(f"repo.repo_id = {settings.repo_id!r} is not a repo id; write owner/name")
    api = HfApi(endpoint=endpoint, token=first(keys, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"))
    return HubRepo(api, settings.repo_id, endpoint=endpoint, timeout_s=TIMEOUT_S / 2)
