"""A Hugging Face model repo. Creating a repo imports huggingface_hub; importing this module does
not."""

from __future__ import annotations

import copy
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from miner_guard.config import RepoSettings, optional_deps
from miner_guard.uploads.repos.base import (
    BLOCK_BYTES,
    TIMEOUT_S,
    Missing,
    ObjectInfo,
    Repo,
    RepoError,
    first_line,
    server_time,
)
from miner_guard.uploads.repos.credentials import find, first
from miner_guard.validators.facts import Published
from miner_guard.validators.files import USUAL, Layout

T = TypeVar("T")

_BRANCH = "main"
_DEFAULT_ENDPOINT = "https://huggingface.co"


class HubRepo(Repo):
    """One model repo, read at one revision."""

    def __init__(
        self,
        api: Any,
        repo_id: str,
        *,
        endpoint: str,
        token: str | None,
        timeout_s: float,
        revision: str = _BRANCH,
    ) -> None:
        self._api = api
        self._repo_id = repo_id
        self._endpoint = endpoint.rstrip("/")
        self._token = token
        self._timeout_s = timeout_s
        self._revision = revision

    @property
    def label(self) -> str:
        return f"repo:{self._repo_id}"

    def state(self, layout: Layout = USUAL, outer_step: int | None = None) -> Published:
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
        return Repo.state(pinned, layout, outer_step)

    def head(self, key: str) -> ObjectInfo:
        modified = self._modified(key)
        with self._open(key, "HEAD") as answer:
            headers = answer.headers
            size = headers.get("X-Linked-Size") or headers.get("Content-Length")
            checksum = headers.get("X-Linked-Etag") or headers.get("ETag")
            now = server_time(headers.get("Date"), "the Hub")
        return ObjectInfo(
            key, int(size or 0), max(0.0, now - modified), (checksum or "").strip('W/"') or None
        )

    def _modified(self, key: str) -> float:
        """Time of the last commit that changed this file: a README commit must not make gradients
        look fresh."""
        paths = self._guarded(
            lambda: self._api.get_paths_info(
                self._repo_id, [key], expand=True, revision=self._revision
            )
        )
        if not paths:
            raise Missing(f"repo {self._repo_id} has no such file")
        modified: float = paths[0].last_commit.date.timestamp()
        return modified

    def read(self, key: str, limit: int) -> Iterator[bytes]:
        with self._open(key, "GET") as answer:
            while block := self._guarded(lambda: answer.read(BLOCK_BYTES)):
                yield block
            # http.client does not report a truncated body.
            if answer.length:
                raise RepoError(
                    f"incomplete response from the Hub: {key} was cut off; {answer.length} bytes "
                    "are missing"
                )

    def _open(self, key: str, method: str) -> Any:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        url = f"{self._endpoint}/{self._repo_id}/resolve/{self._revision}/{key}"
        request = urllib.request.Request(url, method=method, headers=headers)
        opener = urllib.request.build_opener(_Redirects)
        return self._guarded(lambda: opener.open(request, timeout=self._timeout_s))

    def _guarded(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except RepoError:
            raise
        except Exception as error:
            raise _translated(error, self._repo_id) from error


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to large-file storage without the token, which the storage must not see and
    would reject.

    A HEAD stops at the Hub, whose response already has the file's size and digest.
    """

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        if req.get_method() == "HEAD" and headers.get("X-Linked-Etag"):
            return fp
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_302

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        further = super().redirect_request(req, fp, code, msg, headers, newurl)
        if further is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            further.remove_header("Authorization")
        return further


def open_hub(settings: RepoSettings, env: Mapping[str, str] | None = None) -> HubRepo:
    """The repo named in the settings. Raises RepoError if a setting or the library is missing."""
    keys = find(settings, env)
    endpoint = settings.endpoint or first(keys, "HF_ENDPOINT") or _DEFAULT_ENDPOINT
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
    token = first(keys, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    api = HfApi(endpoint=endpoint, token=token)
    return HubRepo(api, settings.repo_id, endpoint=endpoint, token=token, timeout_s=TIMEOUT_S / 2)


def _status(error: Exception) -> Any:
    return getattr(getattr(error, "response", None), "status_code", None) or getattr(
        error, "code", None
    )


def _translated(error: Exception, repo_id: str) -> RepoError:
    """Translate an exception by its status and class name, because different library versions
    define the classes in different modules."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    status = _status(error)
    no_file = status == 404 and isinstance(error, urllib.error.HTTPError)
    if no_file or kinds & {"EntryNotFoundError", "RevisionNotFoundError"}:
        return Missing(f"repo {repo_id} has no such file")
    if status in (401, 403) or "GatedRepoError" in kinds:
        return RepoError(
            f"the Hub rejected the token for {repo_id} ({status}); check HF_TOKEN and "
            "its write permission"
        )
    if "RepositoryNotFoundError" in kinds or status == 404:
        return Missing(f"repo {repo_id} does not exist, or the token has no access to it")
    if status in (408, 409, 412, 429, 500, 502, 503, 504):
        return RepoError(f"the Hub is busy ({status})")
    network = {"TransportError", "ConnectionError", "Timeout", "HTTPException"}
    if status is None and (kinds & network or isinstance(error, OSError)):
        return RepoError(f"no response from the Hub for {repo_id}: {first_line(error)}")
    return RepoError(f"repo {repo_id}: {type(error).__name__}: {first_line(error)}")
