"""A folder as a repo: for the demo, for tests, and for miners that sync a folder by other means."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from miner_guard.uploads.repos.base import (
    DOCUMENT_LIMIT,
    Missing,
    ObjectInfo,
    RepoError,
    digest_of,
    published_state,
)
from miner_guard.validators.facts import Published
from miner_guard.validators.layout import USUAL, Layout

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
        files = (p for p in self._root.rglob("*") if p.is_file() and not p.name.startswith("."))
        keys = (str(path.relative_to(self._root)) for path in files)
        return [self.head(k) for k in sorted(keys) if k.startswith(prefix)]

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
        target = self._path(key)
        draft = target.with_name(f".{target.name}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(data)
            os.replace(draft, target)
        except OSError as error:
            raise _refused(self._path(key), error) from error

    def delete(self, key: str) -> None:
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            raise _refused(self._path(key), error) from error

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
