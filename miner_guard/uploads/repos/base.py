"""Where a miner publishes, behind one class: a local folder, S3/R2, Hugging Face. Read only: the
miner publishes with its own code.

`metadata.json` at the root contains the outer and the inner step, `epoch-N/` holds `gradients.pt`
and `config.json`.

Any call here may hang if its server does. In the supervisor, use `uploads.repos.look_at`, which
probes in a child with a deadline.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

from miner_guard.validators.facts import (
    GRADIENTS,
    METADATA,
    Published,
    config_key,
    gradients_key,
    whole,
)

T = TypeVar("T")

TIMEOUT_S = 20.0
"""Deadline for one look at a repo; a single request gets half of it."""

BLOCK_BYTES = 1024 * 1024
"""Chunk size for reads."""

FETCHED_PREFIX = "miner-guard-audit-"
"""Start of the names of temporary folders for fetched files; an audit sweeps those that a killed
process left."""

DOCUMENT_LIMIT = 16 * 1024 * 1024
"""Refuse a larger JSON document without reading it."""


class RepoError(Exception):
    """The repo refused the request or did not respond. The message is human-readable: what happened
    and what to do."""


class Missing(RepoError):
    """The repo responded, but the object does not exist."""


class RepoRefused(RepoError):
    """The storage rejects these keys outright; retrying will not help."""


class Damaged(RepoError):
    """The repo responded, but no validator can read what it holds: a document that is not a JSON
    object, or an object that is encrypted with a customer's key or archived."""


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

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Metadata of one object. Raises Missing."""

    @abstractmethod
    def read(self, key: str, limit: int) -> Iterator[bytes]:
        """Blocks of one object. Raises Missing; may refuse one larger than `limit` unread."""

    def _guarded(self, work: Callable[[], T]) -> T:
        """The client library's answer; its exceptions become RepoErrors."""
        try:
            return work()
        except RepoError:
            raise
        except Exception as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> RepoError:
        return RepoError(f"{self.label}: {type(error).__name__}: {first_line(error)}")

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

    def state(self, outer_step: int | None = None) -> Published:
        """What a validator that scores `outer_step` (None: the step that the metadata names) would
        find; an empty repo is a valid result. Raises RepoError if unreadable."""
        metadata = self._document(METADATA)
        named, inner = whole(metadata, "outer_step"), whole(metadata, "inner_step")
        run = (metadata or {}).get("run")
        outer = named if outer_step is None else outer_step
        if outer is None:
            lacking = None if metadata is None else f"{METADATA} contains no outer step"
            return Published(reason=lacking, empty=metadata is None, metadata=metadata)
        complete = isinstance(run, (str, int)) and inner is not None and outer == named
        published = Published(
            reason=f"{METADATA} points to outer step {outer}, which has no {GRADIENTS}",
            outer_step=outer,
            inner_step=inner,
            revision=f"{run}.{outer}.{inner}" if complete else None,
            metadata=metadata,
            config=self._document(config_key(outer)),
        )
        try:
            entry = self.head(gradients_key(outer))
        except Missing:
            return published
        return replace(
            published,
            reason=None,
            age_s=entry.age_s,
            size_bytes=entry.size_bytes,
            checksum=entry.checksum,
        )

    def _document(self, key: str) -> dict[str, Any] | None:
        """The JSON object at `key`, None if it does not exist. Raises Damaged for other content."""
        try:
            return parsed(key, self.get(key))
        except Missing:
            return None


def check_size(key: str, size: int, limit: int) -> None:
    """Raise RepoError for an object, or the part read of it, larger than `limit`."""
    if size > limit:
        raise RepoError(f"{key} is {size} bytes, over the limit of {limit}")


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
