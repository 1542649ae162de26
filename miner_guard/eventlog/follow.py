"""Follows guard.jsonl while the guard writes and rotates it, and returns each new line exactly
once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from miner_guard.eventlog.query import Hit, Query, Readable, Seen, blocks, files_of, matching

_POLL_EVERY_S = 0.2


class _Bounded:
    """A view of the next `size` bytes of a file."""

    def __init__(self, file: Readable, size: int) -> None:
        self._file, self._left = file, size

    def read(self, size: int, /) -> bytes | None:
        data = self._file.read(min(size, self._left))
        self._left -= len(data or b"")
        return data


class Position(NamedTuple):
    """A place in a log. It stays valid when log rotation renames the file."""

    inode: int
    offset: int


class Follower:
    """Returns the new lines of a log as they are written, across rotations, each exactly once."""

    def __init__(self, log: Path, query: Query, start: Position | None = None) -> None:
        """Start at `start`, or at the current end of the log if `start` is None or its file is
        gone."""
        self._log = log
        self._query = query
        self._file: BinaryIO | None = None
        self._rest = b""
        if not (start and self._begin_at(start)) and log.is_file():
            self._file = open(log, "rb", buffering=0)  # noqa: SIM115
            self._file.seek(0, os.SEEK_END)

    def _begin_at(self, start: Position) -> bool:
        """Open the file that `start` is in; False if it is gone."""
        path = next((path for path in files_of(self._log) if _inode(path) == start.inode), None)
        if path is None or not self._open(path, start.inode) or self._file is None:
            return False
        # If the file is shorter than the offset, it is a new one that has reused the inode.
        size = os.fstat(self._file.fileno()).st_size
        self._file.seek(start.offset if start.offset <= size else 0)
        return True

    @property
    def position(self) -> Position | None:
        """Start of the first line that `poll` has not read yet; None before the log exists."""
        if self._file is None:
            return None
        here = os.fstat(self._file.fileno()).st_ino
        return Position(here, self._file.tell() - len(self._rest))

    def past(self, seen: Seen) -> Iterator[Hit]:
        """Hits logged before this follower started, oldest first. Call it before `poll`."""
        if self._file is None:
            return
        our_inode, end = os.fstat(self._file.fileno()).st_ino, self._file.tell()
        for path in files_of(self._log):
            try:
                with open(path, "rb", buffering=0) as file:
                    here = os.fstat(file.fileno()).st_ino == our_inode
                    part = _Bounded(file, end) if here else file
                    yield from matching(blocks(part), self._query, seen)
            except FileNotFoundError:
                continue
            if here:
                return

    def poll(self, limit: int = -1) -> list[Hit]:
        """Hits since the last call: all of them, or those in the next `limit` bytes if `limit` is
        not negative."""
        hits: list[Hit] = []
        while self._file is not None or self._open(self._log, _inode(self._log)):
            assert self._file is not None
            following = self._following()
            # Read only after looking for the next file: lines written before the rotation are in
            # the open one.
            piece = self._file.read(limit)
            data = self._rest + piece
            end = data.rfind(b"\n") + 1
            self._rest = data[end:]
            hits += matching([(data, 0, end)], self._query, Seen())
            if following is None or (limit >= 0 and piece):
                break
            self._open(*following)
        return hits

    def _following(self) -> tuple[Path, int | None] | None:
        """The file that follows the open one, with its inode; None if no rotation has happened
        since."""
        assert self._file is not None
        our_inode = os.fstat(self._file.fileno()).st_ino
        for _ in range(3):
            files = [
                (path, inode) for path in files_of(self._log) if (inode := _inode(path)) is not None
            ]
            place = next(
                (number for number, (_, inode) in enumerate(files) if inode == our_inode), None
            )
            if place is not None:
                return files[place + 1] if place + 1 < len(files) else None
            # A rotation may be in progress and may have renamed a listed file before its `stat`.
            time.sleep(0.01)
        return files[0] if files else None

    def _open(self, path: Path, inode: int | None) -> bool:
        """Open `path` if its inode is still `inode`. Otherwise keep the open file and return False;
        the caller tries again later."""
        try:
            file = open(path, "rb", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            return False
        if os.fstat(file.fileno()).st_ino != inode:
            file.close()
            return False
        self.close()
        self._file, self._rest = file, b""
        return True

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def hits(self) -> Iterator[Hit]:
        """Yield hits until the process is interrupted."""
        while True:
            yield from self.poll()
            time.sleep(_POLL_EVERY_S)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
