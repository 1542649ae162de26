"""run.db: the one file that holds a run's events, its present state, and its upload decisions.

The guard's writer thread (`guard.disk`) fills it through `RunStore` and keeps what the file does
not take; every reader queries it through `RunReader`. A damaged file is set aside and replaced.
Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import sqlite3
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miner_guard.record.events import LEVELS, RESERVED, Event, degraded, event
from miner_guard.record.words import visible
from miner_guard.state_dir import finite, has_room, is_full, make_folder, open_private, set_aside

SCHEMA = """
CREATE TABLE IF NOT EXISTS event (
  id INTEGER PRIMARY KEY, ts TEXT NOT NULL, level INTEGER NOT NULL, name TEXT NOT NULL,
  rank INTEGER, run TEXT, host TEXT, text TEXT NOT NULL, fields TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS event_name ON event (name);
CREATE INDEX IF NOT EXISTS event_ts ON event (ts);
CREATE TABLE IF NOT EXISTS now (
  section TEXT PRIMARY KEY, document TEXT NOT NULL, written REAL NOT NULL);
CREATE TABLE IF NOT EXISTS reserve (id INTEGER PRIMARY KEY, room BLOB);
CREATE TABLE IF NOT EXISTS decision (
  id TEXT PRIMARY KEY, wall REAL NOT NULL, outer_step INTEGER, inner_step INTEGER, kind TEXT,
  allowed INTEGER, shadow INTEGER, reason TEXT, verdicts TEXT);
CREATE TABLE IF NOT EXISTS upload (
  id INTEGER PRIMARY KEY, wall REAL NOT NULL, decision_id TEXT, tag TEXT, outer_step INTEGER,
  inner_step INTEGER, kind TEXT, bytes INTEGER, seconds REAL, attempts INTEGER, checksum TEXT,
  outcome TEXT, error TEXT, verified REAL);
CREATE INDEX IF NOT EXISTS decision_wall ON decision (wall);
"""

LEDGER = ("decision", "upload")
"""The tables that record what was published and why."""

MAX_ROWS = {"event": 300_000, "decision": 200_000, "upload": 200_000}
"""Number of most recent rows to keep. Events take about 120 MB: a month of steps of 15 s with
everything else. Decisions take about 0.5 GB: a miner may ask at every step."""

_FORGET_EVERY = 4096
"""Rows written between cleanups."""

_DAMAGED = (
    "malformed",
    "not a database",
    "file is encrypted",
    "no such table",
    "no such column",
    "has no column",
)

_HOLD_S = 2.0
"""How long a writer waits for a reader to finish. Only the writer's thread waits."""

_PATIENCE_S = 5.0
"""How long a reader waits for a writer. A commit takes milliseconds."""

_POLL_EVERY_S = 0.2
_RESERVE = 128 * 1024
_PAGE = 5_000
"""Rows that a reader fetches at once. While it reads a page, the writer waits."""

Row = tuple[str, Sequence[Any]]
"""A statement and its values."""

_NOT_A_ROW = (OverflowError, ValueError, sqlite3.ProgrammingError, sqlite3.IntegrityError)
"""OverflowError: an integer of more than 64 bits. ValueError: text that is not valid Unicode."""

RUN_SECTION = "run"
"""The section with the guard's own fields."""

_MAX_ID = 2**63 - 1


# --- rows ---


def event_row(record: Mapping[str, Any]) -> Row:
    """The row of an event that the log has completed (a line of guard.jsonl)."""
    fields = {name: value for name, value in record.items() if name not in RESERVED}
    return (
        "INSERT INTO event (ts, level, name, rank, run, host, text, fields) "
        "VALUES (?,?,?,?,?,?,?,?)",
        (
            record["ts"],
            LEVELS[record["level"]],
            record["event"],
            record.get("rank"),
            record.get("run_id"),
            record.get("host"),
            _text(str(record["msg"])),
            _json(finite(fields)),
        ),
    )


def now_row(section: str, document: Any) -> Row:
    """The row that replaces one section of the present state."""
    return (
        f"INSERT INTO now (section, document, written) VALUES (?,?,{_CLOCK}) "
        "ON CONFLICT (section) DO UPDATE SET document = excluded.document, "
        "written = excluded.written",
        (section, _json(finite(document))),
    )


def section_of(row: Row) -> str | None:
    """The section of the present state that a row replaces; None for any other row."""
    statement, values = row
    return values[0] if statement.startswith("INSERT INTO now") else None


_CLOCK = "(julianday('now') - 2440587.5) * 86400.0"
"""SQLite's expression for the seconds since 1970."""

_SECONDS = "(julianday(ts) - 2440587.5) * 86400.0"
"""The time of an event as seconds since 1970."""

CLEAR_NOW: Row = ("DELETE FROM now", ())
"""Removes what the previous guard wrote about itself."""

_DECISION = ("outer_step", "inner_step", "kind", "allowed", "shadow", "reason")
_UPLOAD = (
    *("decision_id", "tag", "outer_step", "inner_step", "kind", "bytes", "seconds"),
    *("attempts", "checksum", "error", "verified"),
)


def decision_row(document: Mapping[str, Any]) -> Row:
    """The row of a gate decision (`Decision.as_dict()`)."""
    return _insert(
        "decision",
        id=document.get("decision_id"),
        wall=document.get("decided_at") or 0.0,
        **{name: document.get(name) for name in _DECISION},
        verdicts=_json(document.get("verdicts") or []),
    )


def upload_row(wall: float, outcome: str, **fields: Any) -> Row:
    """The row of an upload's outcome: `reported`, `verified`, `superseded`, `refuted` or
    `failed`."""
    columns = {name: fields.get(name) for name in _UPLOAD}
    return _insert("upload", wall=wall, outcome=outcome, **columns)


def _insert(table: str, **columns: Any) -> Row:
    """A row whose `id` is already stored is ignored."""
    names, marks = ", ".join(columns), ",".join("?" * len(columns))
    verb = "INSERT OR IGNORE" if "id" in columns else "INSERT"
    return f"{verb} INTO {table} ({names}) VALUES ({marks})", tuple(columns.values())


def _json(document: Any) -> str:
    return _text(json.dumps(document, ensure_ascii=False, default=str))


def _text(text: str) -> str:
    """Replace lone surrogates, which stand for bytes that are not UTF-8."""
    return text.encode("utf-8", "replace").decode()


# --- writing ---


class RunStore:
    """Writes one run.db, opened at the first write, from one thread at a time."""

    def __init__(self, path: Path, report: Callable[[Event], None] = lambda _event: None) -> None:
        """`report` receives each problem of the file that a write has solved or worked around."""
        self.path = path
        self._report = report
        self._connection: sqlite3.Connection | None = None
        self._written = 0
        self._full = self._rejected = False

    def write(self, *rows: Row) -> None:
        """Write rows in one transaction. Raises OSError if the file accepts none of them: ENOSPC if
        the disk is full, but then it still has room for the rows of the present state."""
        try:
            if self._connection is not None and not self.path.exists():
                # The file may have been removed to free space. An open descriptor would keep that
                # space, and rows written to it would be lost.
                self._leave()
            if self._full and not has_room(self.path.parent):
                # A small row may still fit after a larger one failed; that does not end the outage.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._repairing(lambda db: self._write_all(db, rows))
            if self._full and self._connection is not None:
                # The rows are written, whether or not there is room for the reserve again.
                with contextlib.suppress(sqlite3.OperationalError):
                    _reserve(self._connection)
                    self._full = False
        except (sqlite3.Error, OSError) as error:
            self._full = _no_room(error, self.path.parent)
            if self._full:
                self._write_now_in_place(rows)
            if isinstance(error, OSError):
                raise
            raise OSError(errno.ENOSPC if self._full else errno.EIO, str(error)) from error

    def close(self) -> None:
        """Close the file; a later write opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _write_all(self, db: sqlite3.Connection, rows: Sequence[Row]) -> None:
        rejected = ""
        with db:
            for row in rows:
                try:
                    db.execute(*row)
                except _NOT_A_ROW as error:
                    rejected = str(error)
        if rejected and not self._rejected:
            self._rejected = True
            self._report(degraded(f"{self.path.name} does not accept a row ({rejected})"))
        before, self._written = self._written, self._written + len(rows)
        if before // _FORGET_EVERY != self._written // _FORGET_EVERY:
            _forget_old(db)

    def _write_now_in_place(self, rows: Sequence[Row]) -> None:
        """On a full disk, replace the present state within the space that the file has: readers
        must learn that the disk is full rather than conclude that the guard is gone."""
        with contextlib.suppress(sqlite3.Error, OSError):
            db = self._opened()
            with db:
                db.execute("DELETE FROM reserve")
            for row in rows:
                if section_of(row) is not None:
                    with db:
                        db.execute(*row)

    def _repairing(self, work: Callable[[sqlite3.Connection], None]) -> None:
        """Run `work`; if the file is damaged, set it aside and retry with a new one."""
        try:
            work(self._opened())
        except sqlite3.DatabaseError as error:
            if not any(words in str(error) for words in _DAMAGED):
                raise
            self.close()
            aside = set_aside(self.path)
            self._leave()
            reason = f"damaged ({error})"
            text = f"FILE SET ASIDE: {self.path} was {reason}, now {aside}"
            fields: dict[str, Any] = {"what": str(self.path), "reason": reason, "aside": str(aside)}
            self._report(event("guard_degraded", "warning", text, **fields))
            work(self._opened())

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            make_folder(self.path.parent)
            # Create the file first: SQLite copies its mode to the journal.
            os.close(open_private(self.path, os.O_RDWR | os.O_CREAT))
            db = sqlite3.connect(self.path, timeout=_HOLD_S, check_same_thread=False)
            try:
                # Not WAL: every process that opens the file would map its -shm, and truncating that
                # would kill them all with SIGBUS. A rollback journal maps nothing. It persists, so
                # that a full disk still has room for the present state.
                db.execute("PRAGMA journal_mode = PERSIST")
                db.execute("PRAGMA journal_size_limit = 1048576")
                # A process that is killed costs no commit; a power cut may cost the last one.
                db.execute("PRAGMA synchronous = NORMAL")
                # Debian's SQLite overwrites deleted content. To free the reserve, the journal would
                # need more room than the reserve has in it, and a full disk has no more.
                db.execute("PRAGMA secure_delete = OFF")
                db.executescript(SCHEMA)
                try:
                    _reserve(db)
                except sqlite3.OperationalError as error:
                    if not _no_room(error, self.path.parent):
                        raise
                    # The file may still have room for the present state.
                    self._full = True
                _forget_old(db)
            except sqlite3.Error:
                db.close()
                raise
            self._connection = db
        return self._connection

    def _leave(self) -> None:
        """Close a file that no longer exists, and remove its journal."""
        self.close()
        for leftover in ("-journal", "-wal", "-shm"):
            self.path.with_name(self.path.name + leftover).unlink(missing_ok=True)


def _no_room(error: Exception, where: Path) -> bool:
    if isinstance(error, OSError):
        return is_full(error)
    try:
        return "disk is full" in str(error) or (
            "disk I/O error" in str(error) and not has_room(where)
        )
    except OSError:
        return False


def _reserve(db: sqlite3.Connection) -> None:
    """Keep room for the present state on a full disk: in the file and, by overwriting that room, in
    the journal."""
    for statement in (
        "INSERT OR REPLACE INTO reserve VALUES (1, randomblob(?))",
        # The same size again: SQLite changes each page in place, so it copies them to the journal.
        "UPDATE reserve SET room = randomblob(?)",
    ):
        with db:
            db.execute(statement, (_RESERVE,))


def _forget_old(db: sqlite3.Connection) -> None:
    with db:
        for table, limit in MAX_ROWS.items():
            last = f"SELECT MAX(rowid) FROM {table}"
            db.execute(f"DELETE FROM {table} WHERE rowid <= ({last}) - ?", (limit,))


# --- reading ---


@dataclass(frozen=True)
class StoredEvent:
    """One event of the record."""

    id: int
    ts: str
    """UTC, ISO 8601; these compare as text."""

    level: str
    name: str
    rank: int | None
    run_id: str | None
    host: str | None
    text: str
    fields_json: str

    @functools.cached_property
    def fields(self) -> Mapping[str, Any]:
        """The event's measured values."""
        document: Mapping[str, Any] = json.loads(self.fields_json)
        return document

    @property
    def headline(self) -> str:
        """The first line of the text that contains a letter or digit, because a block starts with a
        horizontal line."""
        rows = visible(self.text).splitlines()
        return next((row for row in rows if any(map(str.isalnum, row))), rows[0] if rows else "")

    def record(self) -> dict[str, Any]:
        """The event as a line of guard.jsonl holds it."""
        return {
            "ts": self.ts,
            "level": self.level,
            "event": self.name,
            "msg": self.text,
            "run_id": self.run_id,
            "host": self.host,
            "rank": self.rank,
            **self.fields,
        }


_LEVEL_NAMES = {number: name for name, number in LEVELS.items()}


class RunReader:
    """Queries run.db while a guard may be writing it. Creates no file; without one, or with one
    that cannot be read, every query is empty and `unread` says why."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unread: str | None = None

    def events(
        self,
        names: Iterable[str] = (),
        *,
        min_level: str = "debug",
        since: str = "",
        ranks: Iterable[int] = (),
        after: int = 0,
        limit: int | None = None,
        newest: bool = False,
    ) -> list[StoredEvent]:
        """The matching events, oldest first; the oldest `limit` of them, or with `newest` the
        newest.

        `since` is a time in `iso_utc` format; `after` is an event's id. Empty restrictions do not
        restrict. To follow the log, ask again with `after` set to the last event's id.
        """
        names, ranks = tuple(names), tuple(ranks)
        where: list[str] = []
        values: list[Any] = [*names, *ranks]
        if names:
            where.append(f"name IN ({','.join('?' * len(names))})")
        if ranks:
            where.append(f"rank IN ({','.join('?' * len(ranks))})")
        if LEVELS[min_level] > LEVELS["debug"]:
            where.append("level >= ?")
            values.append(LEVELS[min_level])
        if since:
            where.append("ts >= ?")
            values.append(since)
        rows = self._paged(where, values, limit, newest=newest, after=after)
        return [
            StoredEvent(i, ts, _LEVEL_NAMES.get(level, "info"), name, rank, run, host, text, fields)
            for i, ts, level, name, rank, run, host, text, fields in rows
        ]

    def notable(
        self, names: Iterable[str], min_level: str, **restrictions: Any
    ) -> list[StoredEvent]:
        """The events of these names and those of at least this level, oldest first. The other
        restrictions of `events` apply to each of the two."""
        events = self.events(names, **restrictions)
        events += self.events(min_level=min_level, **restrictions)
        by_id = {stored.id: stored for stored in events}
        return [by_id[number] for number in sorted(by_id)]

    def each(
        self,
        names: Iterable[str] = (),
        *,
        follow: bool = False,
        after: int = 0,
        **restrictions: Any,
    ) -> Iterator[StoredEvent]:
        """Yield the events as `events` does; with `follow`, wait for new ones until the process is
        interrupted."""
        while True:
            for stored in self.events(names, after=after, **restrictions):
                after = stored.id
                yield stored
            if not follow:
                return
            time.sleep(_POLL_EVERY_S)

    def _paged(
        self, where: list[str], values: list[Any], limit: int | None, *, newest: bool, after: int
    ) -> list[Sequence[Any]]:
        rows: list[Sequence[Any]] = []
        order = "DESC" if newest else "ASC"
        # Exactly one lower and one upper bound: with two lower ones SQLite may begin each page at
        # the first event.
        condition = " AND ".join(["id > ? AND id < ?", *where])
        first, end = after, _MAX_ID
        while limit is None or len(rows) < limit:
            page = _PAGE if limit is None else min(_PAGE, limit - len(rows))
            batch = self._ask(
                "SELECT id, ts, level, name, rank, run, host, text, fields FROM event "
                f"WHERE {condition} ORDER BY id {order} LIMIT ?",
                (first, end, *values, page),
            )
            rows += [tuple(row) for row in batch]
            if len(batch) < page:
                break
            first, end = (first, rows[-1][0]) if newest else (rows[-1][0], end)
        return rows[::-1] if newest else rows

    def before_run(self, run_id: str) -> int:
        """The id before the first event of a run; that of the newest event if there is none."""
        query = "SELECT MIN(id) AS id FROM event WHERE run = ?"
        first = next((row["id"] for row in self._ask(query, (run_id,))), None)
        return self.last_id() if first is None else first - 1

    def last_id(self) -> int:
        """The id of the newest event; 0 if there is none."""
        return next((row["id"] for row in self._ask("SELECT MAX(id) AS id FROM event", ())), 0) or 0

    def counts(self, since: str = "", until: str = "") -> dict[str, int]:
        """How many events of each name the record holds, from `since` to before `until`."""
        query = "SELECT name, COUNT(*) AS count FROM event WHERE ts >= ? AND ts < ? GROUP BY name"
        return {row["name"]: row["count"] for row in self._ask(query, (since, until or "~"))}

    def span(self) -> tuple[float, float] | None:
        """The times of the first and the last event, in seconds since 1970; None without events."""
        query = f"SELECT MIN({_SECONDS}) AS first, MAX({_SECONDS}) AS last FROM event WHERE ts IN "
        ends = "((SELECT MIN(ts) FROM event), (SELECT MAX(ts) FROM event))"
        row = next(iter(self._ask(query + ends, ())), None)
        return None if row is None or row["first"] is None else (row["first"], row["last"])

    def columns(
        self, name: str, paths: Sequence[str], *, since: str = "", until: str = "", every: int = 1
    ) -> list[tuple[Any, ...]]:
        """For each event of one name, oldest first: its time in seconds since 1970, then the values
        at these paths, such as `$.loss`; None where one is missing, JSON for a list or a table.

        Much cheaper than `events`: a month of steps takes 0.3 s. `every`: return about one event in
        `every`.
        """
        selected = ", ".join([_SECONDS, *["json_extract(fields, ?)"] * len(paths)])
        where = "name = ? AND ts >= ? AND ts < ? AND id % ? = 0"
        query = f"SELECT {selected} FROM event WHERE {where} ORDER BY id"
        values = (*paths, name, since, until or "~", every)
        return [tuple(row) for row in self._ask(query, values)]

    def now(self) -> dict[str, Any]:
        """The present state: the guard's own fields at the top level, then one section per watcher;
        empty if no guard has written one."""
        return self.now_and_age()[0]

    def now_and_age(self) -> tuple[dict[str, Any], float]:
        """The present state and how many seconds ago the guard last wrote a part of it. In one
        query, because the guard may be about to replace all of it."""
        query = f"SELECT section, document, {_CLOCK} - written AS age FROM now ORDER BY rowid"
        rows = self._ask(query, ())
        sections = {row["section"]: json.loads(row["document"]) for row in rows}
        run = sections.pop(RUN_SECTION, None)
        document = {**run, **sections} if isinstance(run, dict) else sections
        return document, max(0.0, min((row["age"] for row in rows), default=0.0))

    def rows(self, table: str, *, since: float = 0.0, limit: int = 1000) -> list[dict[str, Any]]:
        """The newest `limit` rows of one of the ledger's tables since wall time `since`, oldest
        first. Raises ValueError for any other table."""
        if table not in LEDGER:
            raise ValueError(f"there is no table {table!r}; the tables are {', '.join(LEDGER)}")
        query = f"SELECT * FROM {table} WHERE wall >= ? ORDER BY rowid DESC LIMIT ?"
        return [dict(row) for row in self._ask(query, (since, limit))[::-1]]

    def last(self, table: str) -> dict[str, Any] | None:
        """The newest row of one of the ledger's tables."""
        return next(iter(self.rows(table, limit=1)), None)

    def _ask(self, query: str, values: Sequence[Any]) -> list[sqlite3.Row]:
        """Run one query on a connection of its own: between queries, a reader holds nothing that a
        writer would have to wait for."""
        self.unread = None
        if not self.path.is_file():
            return []
        # Not read-only: a writer that was killed may have left a journal to roll back.
        path = urllib.parse.quote(str(self.path.absolute()))
        try:
            db = sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=_PATIENCE_S)
            try:
                db.row_factory = sqlite3.Row
                return db.execute(query, values).fetchall()
            finally:
                db.close()
        except (sqlite3.Error, OSError) as error:
            self.unread = str(error)
            return []
