"""A folder as a repo: for the demo, for tests, and for miners that sync a folder by other means."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from miner_guard.uploads.repos.base import (
    BLOCK_BYTES,
    Missing,
    ObjectInfo,
    Repo,
    RepoError,
    check_size,
)

_SLACK_S = 5.0
"""Tolerance for rounded file times and for clock skew between a file server and this host."""


class LocalRepo(Repo):
    """Objects are files under `root`; the file system's clock counts as the server's clock."""

    def __init__(self, root: Path, wall: Callable[[], float] = time.time) -> None:
        self._root = root
        self._wall = wall

    @property
    def label(self) -> str:
        return f"folder:{self._root}"

    def head(self, key: str) -> ObjectInfo:
        with self._reported(self._path(key)) as path:
            stat = path.stat()
            digest = hashlib.sha256(usedforsecurity=False)
            with path.open("rb") as file:
                while block := file.read(BLOCK_BYTES):
                    digest.update(block)
        age = self._wall() - stat.st_mtime
        if age < -_SLACK_S:
            raise RepoError(
                f"{path} has a modification time {-age:.0f} s in the future; was the clock set "
                "back? Publish again"
            )
        return ObjectInfo(key, stat.st_size, max(0.0, age), digest.hexdigest())

    def read(self, key: str, limit: int) -> Iterator[bytes]:
        with self._reported(self._path(key)) as path, path.open("rb") as file:
            check_size(key, path.stat().st_size, limit)
            while block := file.read(BLOCK_BYTES):
                yield block

    @contextlib.contextmanager
    def _reported(self, path: Path) -> Iterator[Path]:
        try:
            yield path
        except FileNotFoundError as error:
            raise Missing(f"{path} does not exist") from error
        except OSError as error:
            raise RepoError(
                f"{path} cannot be read: {error.strerror}; check the folder's owner and permissions"
            ) from error

    def _path(self, key: str) -> Path:
        path = (self._root / key).resolve()
        if not path.is_relative_to(self._root.resolve()):
            raise RepoError(f"key {key!r} points outside the repo")
        return path
