"""Reading guard.jsonl and its rotated files back, as fast as a search of the raw bytes allows.

We inspect a line only if it contains one of the query's needles, and then only its head: the guard
writes `ts, level, event, msg, run_id, host, rank` first and in this order (`logs.Emitter`). A line
with another head is parsed as JSON; one that is not JSON is counted, not shown. Standard library
only: a query should not wait for imports.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from miner_guard.eventlog.catalog import LEVELS
from miner_guard.eventlog.rendering import console_line, rotated, visible
from miner_guard.system.clock import iso_utc, parse_iso_utc

_CHUNK = 256 * 1024
_LOOK_EVERY_S = 0.2
_HEAD = re.compile(
    rb'\{"ts": "([0-9T:.Z-]+)", "level": "([a-z]+)", "event": "([a-z_]+)", "msg": '
    rb'"([^"\\]*(?:\\.[^"\\]*)*)", '
    rb'"run_id": "?[^"\\]*"?, "host": "[^"\\]*", "rank": (null|[0-9]+)[,}]'
)
_Block = tuple[bytes, int, int]
"""Bytes, and the range in them that holds whole lines."""

_MIDNIGHT = "0000-00-00T00:00:00.000000"
"""Completes a time that lacks hour, minute or second."""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


@dataclass(frozen=True)
class Query:
    """A query. Empty fields do not restrict it."""

    events: frozenset[str] = frozenset()
    least_level: str = "debug"
    since: str = ""
    """ISO time in UTC; lines with an earlier `ts` are skipped. The format sorts as text."""

    ranks: frozenset[int] = frozenset()

    @property
    def levels(self) -> frozenset[str]:
        """The levels that match."""
        return frozenset(
            name for name, value in LEVELS.items() if value >= LEVELS[self.least_level]
        )

    def needles(self) -> list[bytes]:
        """Byte strings of which a matching line contains at least one; empty if every line must be
        inspected."""
        if self.events:
            return [b'"event": "' + name.encode() + b'"' for name in sorted(self.events)]
        if self.ranks:
            return [b'"rank": ' + str(rank).encode() for rank in sorted(self.ranks)]
        if len(self.levels) < len(LEVELS):
            return [b'"level": "' + name.encode() + b'"' for name in sorted(self.levels)]
        return []


class Hit(NamedTuple):
    """One matching line."""

    raw: bytes
    """The line as stored, without its newline."""

    ts: str
    level: str
    event: str
    msg: str
    rank: int | None

    @property
    def headline(self) -> str:
        """The first line of the message that contains words: a block starts with a rule."""
        rows = visible(self.msg).splitlines()
        return next((row for row in rows if any(map(str.isalnum, row))), rows[0] if rows else "")

    def console(self, *, emoji: bool) -> str:
        """The line as shown on the console."""
        head = {
            "ts": self.ts,
            "level": self.level,
            "event": self.event,
            "msg": self.msg,
            "rank": self.rank,
        }
        return console_line(head, emoji=emoji)

    def record(self) -> dict[str, Any]:
        """The whole event."""
        document: dict[str, Any] = json.loads(self.raw)
        return document


@dataclass
class Seen:
    """Counters of a search."""

    hits: int = 0
    unreadable: int = 0
    """Inspected lines that are not JSON, or not events."""


def since_text(text: str, now: float) -> str:
    """Convert `90s`, `15m`, `1h`, `2d` or an ISO time to the ISO time of the earliest line. Raises
    ValueError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw])", text.strip())
    if match:
        return iso_utc(max(0.0, now - float(match[1]) * _UNITS[match[2]]))
    if re.fullmatch(r"\d{4}-\d\d-\d\d(T\d\d(:\d\d(:\d\d(\.\d{1,6})?)?)?)?Z?", text.strip()):
        given = text.strip().rstrip("Z")
        whole = f"{given}{_MIDNIGHT[len(given) :]}Z"
        with contextlib.suppress(ValueError):
            parse_iso_utc(whole)
            return whole
    raise ValueError(
        f"{text!r} is not a time: allowed are 90s, 15m, 1h, 2d, or 2026-01-02T03:04 (UTC)"
    )


def files_of(log: Path) -> list[Path]:
    """The rotated files and the current one, oldest first."""
    numbers = [
        int(path.name.rsplit(".", 1)[1])
        for path in log.parent.glob(f"{log.name}.*")
        if path.name.rsplit(".", 1)[1].isdigit()
    ]
    older = [rotated(log, number) for number in sorted(numbers, reverse=True)]
    return [path for path in [*older, log] if path.is_file()]


def search(log: Path, query: Query, seen: Seen | None = None) -> Iterator[Hit]:
    """Matching lines of all files of `log`, oldest first. Skips files that vanish meanwhile."""
    seen = Seen() if seen is None else seen
    for path in files_of(log):
        try:
            with open(path, "rb", buffering=0) as file:
                # A file's mtime is the time of its newest line.
                if query.since and iso_utc(os.fstat(file.fileno()).st_mtime) < query.since:
                    continue
                yield from _matching(_blocks(file), query, seen)
        except FileNotFoundError:
            continue


def last(log: Path, query: Query, count: int, seen: Seen | None = None) -> list[Hit]:
    """The newest `count` hits, oldest first. Reads from the end: a long log costs no more than a
    short one."""
    seen = Seen() if seen is None else seen
    pieces: list[list[Hit]] = []
    left = count
    read: set[tuple[int, int]] = set()
    for path in reversed(files_of(log)):
        try:
            with open(path, "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                # A concurrent rotation may rename a file that was already read.
                if (status.st_dev, status.st_ino) in read or (
                    query.since and iso_utc(status.st_mtime) < query.since
                ):
                    continue
                read.add((status.st_dev, status.st_ino))
                for block in _blocks_backwards(file, status.st_size):
                    if left <= 0:
                        break
                    hits = list(_matching([block], query, seen))
                    pieces.append(hits[max(0, len(hits) - left) :])
                    left -= len(pieces[-1])
        except FileNotFoundError:
            continue
    return [hit for piece in reversed(pieces) for hit in piece]


def _blocks_backwards(file: BinaryIO, end: int) -> Iterator[_Block]:
    """A file up to `end` as whole lines, last block first."""
    size = _CHUNK
    while end > 0:
        start = max(0, end - size)
        file.seek(start)
        piece = b""
        while len(piece) < end - start and (more := file.read(end - start - len(piece))):
            piece += more
        first = piece.find(b"\n") + 1 if start else 0
        if start and first in (0, len(piece)):
            # A single line exceeds the block.
            size *= 2
            continue
        yield piece, first, len(piece)
        end, size = start + first, _CHUNK


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes | None: ...


def _blocks(file: _Readable) -> Iterator[_Block]:
    """The rest of a file as whole lines, in blocks as read, without copying; a last line without
    newline as it is."""
    rest = b""
    while piece := file.read(_CHUNK):
        first, last = piece.find(b"\n") + 1, piece.rfind(b"\n") + 1
        if first == 0:
            rest += piece
            continue
        if rest:
            yield rest + piece[:first], 0, len(rest) + first
        else:
            first = 0
        yield piece, first, last
        rest = piece[last:]
    if rest:
        yield rest, 0, len(rest)


def _matching(blocks: Iterable[_Block], query: Query, seen: Seen) -> Iterator[Hit]:
    needles = query.needles()
    accept = _filter(query)
    for block in blocks:
        for raw in _candidates(block, needles):
            hit = _parsed(raw)
            if hit is None:
                seen.unreadable += 1
            elif accept(hit):
                seen.hits += 1
                yield hit


def _candidates(block: _Block, needles: list[bytes]) -> Iterable[bytes]:
    data, begin, end = block
    if not needles:
        return [line for line in data[begin:end].split(b"\n") if line]
    if len(needles) == 1:
        return (line for _, line in _placed(block, needles[0]))
    starts = {start: line for needle in needles for start, line in _placed(block, needle)}
    return [starts[start] for start in sorted(starts)]


def _placed(block: _Block, needle: bytes) -> Iterator[tuple[int, bytes]]:
    data, begin, end = block
    place = data.find(needle, begin, end)
    while place >= 0:
        start = data.rfind(b"\n", begin, place) + 1 or begin
        stop = data.find(b"\n", place, end)
        stop = end if stop < 0 else stop
        yield start, data[start:stop]
        place = data.find(needle, stop, end)


def _filter(query: Query) -> Callable[[Hit], bool]:
    levels, events, ranks, since = query.levels, query.events, query.ranks, query.since

    def accept(hit: Hit) -> bool:
        return (
            hit.level in levels
            and (not events or hit.event in events)
            and (not ranks or hit.rank in ranks)
            and hit.ts >= since
        )

    return accept


def _parsed(raw: bytes) -> Hit | None:
    match = _HEAD.match(raw)
    if match is None:
        return _parsed_whole(raw)
    ts, level, event, msg, rank = match.groups()
    try:
        words = json.loads(b'"' + msg + b'"') if b"\\" in msg else msg.decode()
    except ValueError:
        return None
    return Hit(
        raw,
        ts.decode(),
        level.decode(),
        event.decode(),
        words,
        None if rank == b"null" else int(rank),
    )


def _parsed_whole(raw: bytes) -> Hit | None:
    try:
        document = json.loads(raw)
        rank = document.get("rank")
        ts, level, event = (str(document[name]) for name in ("ts", "level", "event"))
        return Hit(
            raw,
            ts,
            level,
            event,
            str(document.get("msg", "")),
            rank if isinstance(rank, int) else None,
        )
    except (ValueError, KeyError, AttributeError):
        return None


class _Bounded:
    """A view of a file as of when it had `size` bytes."""

    def __init__(self, file: _Readable, size: int) -> None:
        self._file, self._left = file, size

    def read(self, size: int, /) -> bytes | None:
        data = self._file.read(min(size, self._left))
        self._left -= len(data or b"")
        return data


class Position(NamedTuple):
    """A place in a log, whatever the rotation calls its file."""

    inode: int
    offset: int


class Follower:
    """New lines of a log as they are written, across rotations, each exactly once."""

    def __init__(self, log: Path, query: Query, start: Position | None = None) -> None:
        """Starts at `start`, or at the current end of the log if `start` is None or its file is
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
        # A shorter file is a new one with the inode of a deleted one.
        size = os.fstat(self._file.fileno()).st_size
        self._file.seek(start.offset if start.offset <= size else 0)
        return True

    @property
    def position(self) -> Position | None:
        """Where the first line begins that `poll` has not returned; None before the log exists."""
        if self._file is None:
            return None
        here = os.fstat(self._file.fileno()).st_ino
        return Position(here, self._file.tell() - len(self._rest))

    def past(self, seen: Seen) -> Iterator[Hit]:
        """Hits from before this follower started, oldest first. Call it before `poll`."""
        if self._file is None:
            return
        mine, end = os.fstat(self._file.fileno()).st_ino, self._file.tell()
        for path in files_of(self._log):
            try:
                with open(path, "rb", buffering=0) as file:
                    here = os.fstat(file.fileno()).st_ino == mine
                    part = _Bounded(file, end) if here else file
                    yield from _matching(_blocks(part), self._query, seen)
            except FileNotFoundError:
                continue
            if here:
                return

    def poll(self, limit: int = -1) -> list[Hit]:
        """Hits since the last call: all of them, or those in the next `limit` bytes."""
        hits: list[Hit] = []
        while self._file is not None or self._open(self._log, _inode(self._log)):
            assert self._file is not None
            following = self._following()
            # Read only after checking the names: lines written before the rotation are in the open
            # file.
            piece = self._file.read(limit)
            data = self._rest + piece
            end = data.rfind(b"\n") + 1
            self._rest = data[end:]
            hits += _matching([(data, 0, end)], self._query, Seen())
            if following is None or (limit >= 0 and piece):
                break
            self._open(*following)
        return hits

    def _following(self) -> tuple[Path, int | None] | None:
        """The file that follows the open one, with its inode; None if there is none yet."""
        assert self._file is not None
        mine = os.fstat(self._file.fileno()).st_ino
        for _ in range(3):
            files = [
                (path, inode) for path in files_of(self._log) if (inode := _inode(path)) is not None
            ]
            place = next((number for number, (_, inode) in enumerate(files) if inode == mine), None)
            if place is not None:
                return files[place + 1] if place + 1 < len(files) else None
            # A rotation may be in progress: a listed name was renamed before we could stat it.
            time.sleep(0.01)
        return files[0] if files else None

    def _open(self, path: Path, inode: int | None) -> bool:
        """Open `path` if it still is the intended file; otherwise keep the open one and retry
        later."""
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
        """Yields hits forever, until interrupted."""
        while True:
            yield from self.poll()
            time.sleep(_LOOK_EVERY_S)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
