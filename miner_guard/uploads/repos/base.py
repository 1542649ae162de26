"""Where a miner publishes, behind one class: a local folder, S3/R2, Hugging Face.

The profile's `Layout` says what validators read, and under which keys. In the usual one,
`metadata.json` at the root contains the outer and the inner step, `epoch-N/` holds `gradients.pt`,
`config.json` and `metadata.json`. The miner publishes with its own code: the guard only reads, and
writes one small object to test the keys.

Any call here may hang if its server does. In the supervisor, use `uploads.repos.look_at`, which
probes in a child with a deadline.
"""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from miner_guard.validators.facts import Published
from miner_guard.validators.files import USUAL, Layout, RootMetadata, mixed

METADATA = "metadata.json"
"""The root copy is the pointer that validators start from; each epoch's folder has a copy too."""

BLOCK_BYTES = 1024 * 1024
"""Chunk size for reads and writes."""

LOOK_AGAIN_S = 1.5
"""Pause between an audit's reads: reads may lag two seconds behind the last write."""

LOOKS = 3
"""Number of reads before an audit accepts a mixed view; the switch between revisions takes a few
short requests."""

DOCUMENT_LIMIT = 16 * 1024 * 1024
"""Refuse a larger JSON document without reading it."""


class RepoError(Exception):
    """The repo refused the request or did not respond. The message is human-readable: what happened
    and what to do."""


class Missing(RepoError):
    """The repo responded, but the object does not exist."""


class RepoRefused(RepoError):
    """The storage rejects these keys outright; retrying will not help."""


class RepoUnreadable(RepoError):
    """No reader can get this object from storage: it is encrypted with a customer key, or
    archived."""


class Damaged(RepoError):
    """The repo responded, but a document that validators read is not a JSON object."""


@dataclass(frozen=True)
class ObjectInfo:
    """One published object."""

    key: str
    size_bytes: int
    age_s: float
    """Seconds since the last change by the server's clock, so this host's clock skew does not
    matter."""

    checksum: str | None
    """As reported by the repo: an ETag or a sha256; None if it reports neither."""


class Repo(ABC):
    """One published repo. All methods except `label` may block on the network and raise
    RepoError."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Name for display: `bucket:llama-4b-ws-4-007`."""

    def state(self, layout: Layout = USUAL) -> Published:
        """The state that a validator would find; an empty repo is a valid result. Raises RepoError
        if unreadable."""
        return published_state(self, time.time(), layout)

    @abstractmethod
    def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """Published objects under `prefix`, by key."""

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Metadata of one object. Raises Missing."""

    @abstractmethod
    def read(self, key: str, limit: int) -> Iterator[bytes]:
        """Blocks of one object. Raises Missing; may refuse one larger than `limit` unread."""

    def get(self, key: str, limit: int = DOCUMENT_LIMIT) -> bytes:
        """Bytes of one object. Raises Missing, and RepoError if it is larger than `limit`."""
        return b"".join(self._limited(key, limit))

    def save(self, key: str, path: Path, limit: int) -> None:
        """Stream one object into a file. Raises the same errors as `get`."""
        try:
            with path.open("wb") as file:
                file.writelines(self._limited(key, limit))
        except OSError as error:
            raise RepoError(
                f"{path} cannot be written: {error.strerror}; check free space and permissions"
            ) from error

    def _limited(self, key: str, limit: int) -> Iterator[bytes]:
        size = 0
        for block in self.read(key, limit):
            size += len(block)
            check_size(key, size, limit)
            yield block

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Write one small object, which becomes visible immediately."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove one object; ignores a missing one."""


def check_size(key: str, size: int, limit: int) -> None:
    """Raise RepoError for an object, or the part read of it, larger than `limit`."""
    if size > limit:
        raise RepoError(f"{key} is {size} bytes, over the limit of {limit}")


def digest_of(read: Callable[[int], bytes], algorithm: str = "sha256") -> str:
    """The digest of everything that `read` returns, in hexadecimal. Raises whatever `read`
    raises."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    while block := read(BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


def server_time(date: str | None, server: str) -> float:
    """The server's time, from its Date header, so that this host's clock skew cannot make an old
    object look young. Raises RepoError."""
    try:
        return parsedate_to_datetime(date or "").timestamp()
    except (TypeError, ValueError) as error:
        raise RepoError(
            f"{server} sent no valid Date header ({date!r}), so the age is unknown"
        ) from error


def first_line(error: Exception) -> str:
    """The first line of an exception's text, or its type; at most 300 characters."""
    lines = str(error).splitlines()
    return lines[0][:300] if lines else type(error).__name__


def document(repo: Repo, key: str) -> dict[str, Any] | None:
    """The JSON object at `key`, None if it does not exist. Raises RepoError; Damaged if the content
    is not a JSON object."""
    try:
        return parsed(key, repo.get(key))
    except Missing:
        return None


def parsed(key: str, data: bytes) -> dict[str, Any]:
    """Parse `data`, the content of `key`, as a JSON object. Raises Damaged.

    Decodes as validators do: metadata.json from bytes in any of JSON's encodings, other documents
    as UTF-8.
    """
    try:
        document = json.loads(data if key.rpartition("/")[2] == METADATA else data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{key} is not JSON ({error}); publish again") from error
    if not isinstance(document, dict):
        raise Damaged(f"{key} is not a JSON object; publish again")
    return document


def published_state(repo: Repo, now: float, layout: Layout = USUAL) -> Published:
    """Implements `Repo.state`; `now` (this host's wall time) is used only as `seen_at`."""
    for _ in range(LOOKS):
        state = _seen_once(repo, now, layout)
        if mixed(state.metadata, state.size_bytes, state.checksum) is None:
            break
    return state


def _seen_once(repo: Repo, now: float, layout: Layout) -> Published:
    metadata = None if layout.metadata is None else document(repo, layout.metadata)
    root = RootMetadata.of(metadata)
    named = root.outer_step
    entry = _gradients(repo, named, layout)
    if entry is None:
        reason = (
            None
            if metadata is None
            else f"{layout.metadata} points to outer step {named}, which has no {layout.file}"
        )
        return Published(
            reason=reason, empty=metadata is None, seen_at=now, outer_step=named, metadata=metadata
        )
    outer = layout.outer_step_of(entry.key) if layout.metadata is None else named
    inner, run = root.inner_step, root.run
    complete = None not in (run, outer, inner)
    described = layout.outer_step_of(entry.key)
    config = None if described is None else layout.config_of(described)
    return Published(
        age_s=entry.age_s,
        reason=None,
        seen_at=now,
        outer_step=outer,
        inner_step=inner,
        revision=f"{run}.{outer}.{inner}" if complete else None,
        size_bytes=entry.size_bytes,
        checksum=entry.checksum,
        metadata=metadata,
        config=None if config is None else document(repo, config),
    )


def _gradients(repo: Repo, outer_step: int | None, layout: Layout) -> ObjectInfo | None:
    """The gradients for `outer_step`; the newest if no metadata contains a step."""
    if outer_step is not None and (key := layout.gradients_of(outer_step)) is not None:
        try:
            return repo.head(key)
        except Missing:
            return None
    entries = [e for e in repo.list(layout.prefix) if layout.outer_step_of(e.key) is not None]
    return min(entries, key=lambda e: e.age_s, default=None)
