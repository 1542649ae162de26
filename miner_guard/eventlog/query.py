"""Reads guard.jsonl and its rotated files about as fast as the raw bytes can be searched.

A query inspects a line only if the line contains one of the query's needles, and then only the head
of the line: the guard writes `ts, level, event, msg, run_id, host, rank` first and in this order
(`emitter.Emitter`). A line with a different head is parsed as JSON; a line that is not JSON is
counted and not returned. Standard library only, so that a query does not wait for imports.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from miner_guard.eventlog.catalog import LEVELS
from miner_guard.eventlog.rendering import console_line, rotated, visible
from miner_guard.system.clock import iso_utc, parse_iso_utc

_CHUNK = 256 * 1024
_HEAD = re.compile(
    rb'\{"ts": "([0-9T:.Z-]+)", "level": "([a-z]+)", "event": "([a-z_]+)", "msg": '
    rb'"([^"\\]*(?:\\.[^"\\]*)*)", '
    rb'"run_id": "?[^"\\]*"?, "host": "[^"\\]*", "rank": (null|[0-9]+)[,}]'
)
_Block = tuple[bytes, int, int]
"""Bytes, and the start and end of the complete lines in them."""

_MIDNIGHT = "0000-00-00T00:00:00.000000"
"""Supplies the hour, minute or second that a shortened time leaves out."""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


@dataclass(frozen=True)
class Query:
    """A query. Empty fields do not restrict it."""

    events: frozenset[str] = frozenset()
    min_level: str = "debug"
    since: str = ""
    """ISO time in UTC; lines with an earlier `ts` do not match. Times in this format compare as
    text."""

    ranks: frozenset[int] = frozenset()

    @property
    def levels(self) -> frozenset[str]:
        """The levels that match."""
        return frozenset(name for name, value in LEVELS.items() if value >= LEVELS[self.min_level])

    def needles(self) -> list[bytes]:
        """Byte strings; every matching line contains at least one of them. Empty if every line must
        be inspected."""
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
        """The first line of the message that contains a letter or digit, because a block starts
        with a horizontal line."""
        rows = visible(self.msg).splitlines()
        return next((row for row in rows if any(map(str.isalnum, row))), rows[0] if rows else "")

    def console(self, *, emoji: bool) -> str:
        """The line as shown on the console."""
        return console_line(self._asdict(), emoji=emoji)

    def record(self) -> dict[str, Any]:
        """The whole event."""
        document: dict[str, Any] = json.loads(self.raw)
        return document


@dataclass
class Seen:
    """Counters for one search."""

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
    raise ValueError(f"{text!r} is not a time; use 90s, 15m, 1h, 2d, or 2026-01-02T03:04 (UTC)")


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
    """Yield the matching lines from `log` and its rotated files, oldest first. Skips files that
    disappear during the search."""
    seen = Seen() if seen is None else seen
    for path in files_of(log):
        try:
            with open(path, "rb", buffering=0) as file:
                # A file's mtime is the time of its newest line.
                if query.since and iso_utc(os.fstat(file.fileno()).st_mtime) < query.since:
                    continue
                yield from matching(blocks(file), query, seen)
        except FileNotFoundError:
            continue


def last(log: Path, query: Query, count: int, seen: Seen | None = None) -> list[Hit]:
    """The newest `count` hits, oldest first. Reads from the end, so that a long log takes no longer
    than a short one."""
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
                    hits = list(matching([block], query, seen))
                    pieces.append(hits[max(0, len(hits) - left) :])
                    left -= len(pieces[-1])
        except FileNotFoundError:
            continue
    return [hit for piece in reversed(pieces) for hit in piece]


def _blocks_backwards(file: BinaryIO, end: int) -> Iterator[_Block]:
    """A file's complete lines up to offset `end`, in blocks, last block first."""
    size = _CHUNK
    while end > 0:
        start = max(0, end - size)
        file.seek(start)
        piece = b""
        while len(piece) < end - start and (more := file.read(end - start - len(piece))):
            piece += more
        first = piece.find(b"\n") + 1 if start else 0
        if start and first in (0, len(piece)):
            # A line is longer than the block.
            size *= 2
            continue
        yield piece, first, len(piece)
        end, size = start + first, _CHUNK


class Readable(Protocol):
    """A file, or a part of one."""

    def read(self, size: int, /) -> bytes | None: ...


def blocks(file: Readable) -> Iterator[_Block]:
    """The remaining complete lines of a file, in blocks as they are read, mostly without copying. A
    last line without a newline is yielded as a separate block."""
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


def matching(blocks: Iterable[_Block], query: Query, seen: Seen) -> Iterator[Hit]:
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
    ts, level, event, msg, rank_text = match.groups()
    try:
        words = json.loads(b'"' + msg + b'"') if b"\\" in msg else msg.decode()
    except ValueError:
        return None
    rank = None if rank_text == b"null" else int(rank_text)
    return Hit(raw, ts.decode(), level.decode(), event.decode(), words, rank)


def _parsed_whole(raw: bytes) -> Hit | None:
    try:
        document = json.loads(raw)
        words, rank = str(document.get("msg", "")), document.get("rank")
        ts, level, event = (str(document[name]) for name in ("ts", "level", "event"))
        return Hit(raw, ts, level, event, words, rank if isinstance(rank, int) else None)
    except (ValueError, KeyError, AttributeError):
        return None
