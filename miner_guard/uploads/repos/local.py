"""A folder as a repo: for the demo, for tests, and for miners that sync a folder by other means."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from miner_guard.uploads.repos.base import (
    BLOCK_BYTES,
    DOCUMENT_LIMIT,
    Differs,
    Missing,
    Notes,
    ObjectInfo,
    Progress,
    RepoError,
    StagedObject,
    digest_of,
    published_state,
)
from miner_guard.validators.facts import Published
from miner_guard.validators.layout import USUAL, Layout

_INCOMING = ".incoming"
_SLACK_S = 5.0
"""Tolerance for rounded file times and for clock skew between a file server and this host."""


class LocalRepo:
    """Objects are files under `root`; the file system's clock counts as the server's clock."""

    def __init__(self, root: Path, wall: Callable[[], float] = time.time) -> None:
        self._root = root
        self._wall = wall

    @property
    def label(self) -> str:
        return f"folder:{self._root}"

    def state(self, layout: Layout = USUAL) -> Published:
        return published_state(self, self._wall(), layout)

    def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        keys = (str(p.relative_to(self._root)) for p in self._root.rglob("*") if p.is_file())
        return [
            self.head(k)
            for k in sorted(keys)
            if k.startswith(prefix) and not k.startswith(_INCOMING)
        ]

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        try:
            found = path.stat()
            checksum = file_sha256(path)
        except FileNotFoundError as error:
            raise Missing(f"{path} does not exist") from error
        except OSError as error:
            raise RepoError(
                f"{path} cannot be read: {error.strerror}; check the folder's owner and permissions"
            ) from error
        age = self._wall() - found.st_mtime
        if age < -_SLACK_S:
            raise RepoError(
                f"{path} has a modification time {-age:.0f} s in the future; was the clock set "
                "back? Publish again"
            )
        return ObjectInfo(key, found.st_size, max(0.0, age), checksum)

    def get(self, key: str, limit: int = DOCUMENT_LIMIT) -> bytes:
        path = self._path(key)
        try:
            size = path.stat().st_size
            if size > limit:
                raise RepoError(f"{key} is {size} bytes, over the limit of {limit}")
            return path.read_bytes()
        except FileNotFoundError as error:
            raise Missing(f"{path} does not exist") from error
        except OSError as error:
            raise RepoError(
                f"{path} cannot be read: {error.strerror}; check the folder's owner and permissions"
            ) from error

    def save(self, key: str, path: Path, limit: int) -> None:
        source = self._path(key)
        try:
            size = source.stat().st_size
            if size > limit:
                raise RepoError(f"{key} is {size} bytes, over the limit of {limit}")
            shutil.copyfile(source, path)
        except FileNotFoundError as error:
            raise Missing(f"{source} does not exist") from error
        except OSError as error:
            raise RepoError(
                f"{source} cannot be copied to {path}: {error.strerror}; check free space and "
                "permissions"
            ) from error

    def put(self, key: str, data: bytes) -> None:
        draft = self._draft()
        try:
            draft.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(data)
            self._show(draft, key)
        except OSError as error:
            raise _refused(self._path(key), error) from error

    def delete(self, key: str) -> None:
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            raise _refused(self._path(key), error) from error

    def stage(self, key: str, path: Path, progress: Progress, notes: Notes) -> StagedObject:
        draft = self._draft()
        digest = hashlib.sha256()
        try:
            draft.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "rb") as source, open(draft, "wb") as target:
                while chunk := source.read(BLOCK_BYTES):
                    target.write(chunk)
                    digest.update(chunk)
                    progress(len(chunk))
                target.flush()
                os.fsync(target.fileno())
            return StagedObject(
                key, draft.stat().st_size, {"draft": draft.name}, digest.hexdigest()
            )
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise _refused(draft, error) from error

    def commit(self, tickets: Sequence[StagedObject], revision: str) -> None:
        for ticket in tickets:
            draft = self._root / _INCOMING / ticket.data["draft"]
            try:
                self._show(draft, ticket.key)
            except FileNotFoundError as error:
                # The dead publisher already moved it, or it is lost; `confirm` finds out which.
                if not self._path(ticket.key).exists():
                    raise RepoError(f"staged {draft} is gone; publish again") from error
            except OSError as error:
                raise _refused(self._path(ticket.key), error) from error

    def abort(self, tickets: Sequence[StagedObject]) -> None:
        for ticket in tickets:
            (self._root / _INCOMING / ticket.data["draft"]).unlink(missing_ok=True)

    def sweep(self) -> int:
        folder = self._root / _INCOMING
        stale = list(folder.iterdir()) if folder.is_dir() else []
        for path in stale:
            path.unlink(missing_ok=True)
        return len(stale)

    def confirm(self, ticket: StagedObject) -> ObjectInfo:
        entry = self.head(ticket.key)
        if (entry.size_bytes, entry.checksum) != (ticket.size_bytes, ticket.checksum):
            raise Differs(
                f"{ticket.key} reads back as {entry.size_bytes} bytes with sha256 "
                f"{str(entry.checksum)[:12]}, but the staged file had {ticket.size_bytes} bytes "
                f"with sha256 {str(ticket.checksum)[:12]}; publish again"
            )
        return entry

    def _draft(self) -> Path:
        return self._root / _INCOMING / uuid.uuid4().hex

    def _show(self, draft: Path, key: str) -> None:
        target = self._path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        # A revision's age counts from when it becomes visible, not from when its bytes were copied.
        os.utime(draft)
        os.replace(draft, target)

    def _path(self, key: str) -> Path:
        path = (self._root / key).resolve()
        if not path.is_relative_to(self._root.resolve()):
            raise RepoError(f"key {key!r} points outside the repo")
        return path


def file_sha256(path: Path) -> str:
    """sha256 of a file, in hexadecimal. Raises OSError."""
    with open(path, "rb") as file:
        return digest_of(file.read)


def _refused(path: Path, error: OSError) -> RepoError:
    return RepoError(
        f"{path} cannot be written: {error.strerror}; check free space, owner and permissions"
    )
