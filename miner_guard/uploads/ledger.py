"""The ledger: decisions, uploads, repo age, incidents and restarts, in SQLite.

It must never stop the guard. A full disk drops rows and counts them; a damaged file is set aside
and replaced; a locked file or a failing file system queues rows. All methods are thread-safe.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.record.words import counted
from miner_guard.state_dir import has_room, make_folder, open_private, set_aside
from miner_guard.uploads.ledger_schema import SCHEMA, TABLES, VERSION

KEPT_S = 90 * 86400.0
"""The ledger deletes older rows when it opens, and periodically while it writes."""

MAX_DECISIONS = 200_000
"""Number of most recent decisions to keep, about 0.5 GB: a miner may ask at every step."""

_FORGET_EVERY = 4096
"""Rows written between cleanups."""

_OWN_COLUMNS = ("verdicts", "record")
"""Columns of a decision; `document` holds its other fields."""

_DECISION_COLUMNS = ("outer_step", "inner_step", "kind", "allowed", "shadow", "reason")
_UPLOAD_COLUMNS = (
    *("decision_id", "tag", "outer_step", "inner_step", "kind", "bytes", "seconds"),
    *("attempts", "checksum", "error", "verified"),
)

_DAMAGED = (
    "malformed",
    "not a database",
    "file is encrypted",
    "no such table",
    "no such column",
    "has no column",
)

_HOLD_S = 0.1
"""Maximum time in seconds to wait for the file: the wait blocks the supervisor's loop."""

_RETRY_S = 5.0
_LAST_S = 5.0
"""Seconds to flush the queue when the guard exits."""

_MAX_WAITING = 4096

_FULL, _STUCK = "full", "stuck"

_Row = tuple[str, Sequence[Any]]
"""A statement and its values."""

_TROUBLES = (sqlite3.Error, OSError, OverflowError, ValueError)
"""OverflowError: an integer of more than 64 bits. ValueError: text that is not valid Unicode."""


def _no_room(error: Exception, where: Path) -> bool:
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "disk is full" in str(
        error
    ):
        return True
    try:
        # SQLite's error when it has no space for its -shm.
        return "disk I/O error" in str(error) and not has_room(where)
    except OSError:
        return False


class Ledger:
    """One ledger file, opened on the first write or query."""

    def __init__(
        self,
        path: Path,
        report: Callable[[Finding], None] = lambda _finding: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._report = report
        self._monotonic = monotonic
        self._mutex = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._waiting: deque[_Row] = deque()
        self._retry_at = float("-inf")
        self._fault: str | None = None
        self._lost = 0
        self._written = 0
        """Rows written by this object."""

        self.unread: str | None = None
        """Why the last query failed although the file exists."""

    def decision(
        self, document: Mapping[str, Any], inputs: Mapping[str, Any] | None = None
    ) -> None:
        """Store a gate decision (`GateDecision.as_dict()`) and the inputs named in its record."""
        record = document.get("record") or {}
        rest = {name: value for name, value in document.items() if name not in _OWN_COLUMNS}
        wall = document.get("decided_at") or 0.0
        if inputs is not None and record.get("inputs"):
            self._insert("inputs", id=record["inputs"], wall=wall, document=json.dumps(inputs))
        self._insert(
            "decisions",
            id=document.get("decision_id"),
            wall=wall,
            **{name: document.get(name) for name in _DECISION_COLUMNS},
            verdicts=json.dumps(document.get("verdicts") or []),
            record=json.dumps(record),
            document=json.dumps(rest),
        )

    def upload(self, wall: float, outcome: str, **fields: Any) -> None:
        """Store an upload's outcome: `reported`, `verified`, `superseded`, `refuted` or
        `failed`."""
        known = {name: fields.get(name) for name in _UPLOAD_COLUMNS}
        self._insert("uploads", wall=wall, outcome=outcome, **known)

    def repo_age(
        self,
        wall: float,
        age_s: float | None,
        *,
        outer_step: int | None = None,
        inner_step: int | None = None,
        size_bytes: int | None = None,
        checksum: str | None = None,
        reason: str | None = None,
    ) -> None:
        """Store one reading of the repo's age; a null age comes with its reason."""
        self._insert(
            "repo_age",
            wall=wall,
            age_s=age_s,
            outer_step=outer_step,
            inner_step=inner_step,
            size_bytes=size_bytes,
            checksum=checksum,
            reason=reason,
        )

    def incident(
        self, wall: float, label: str, *, cause: str, fix: str, excerpt: str, rank: int | None
    ) -> None:
        """Record an incident."""
        self._insert(
            "incidents", wall=wall, label=label, cause=cause, fix=fix, excerpt=excerpt, rank=rank
        )

    def restart(self, wall: float, cause: str, attempt: int | None, wait_s: float | None) -> None:
        """Record a restart of the miner."""
        self._insert("restarts", wall=wall, cause=cause, attempt=attempt, wait_s=wait_s)

    def _insert(self, table: str, **columns: Any) -> None:
        """Queue one row. A row whose `id` is already stored is ignored."""
        names, marks = ", ".join(columns), ",".join("?" * len(columns))
        verb = "INSERT OR IGNORE" if "id" in columns else "INSERT"
        self.write(f"{verb} INTO {table} ({names}) VALUES ({marks})", tuple(columns.values()))

    def rows(self, table: str, *, since: float = 0.0, limit: int = 1000) -> list[dict[str, Any]]:
        """The newest `limit` rows of a table since wall time `since`, oldest first. Empty if
        unreadable."""
        if table not in TABLES:
            raise ValueError(
                f"the ledger has no table {table!r}; the tables are {', '.join(TABLES)}"
            )
        query = f"SELECT * FROM {table} WHERE wall >= ? ORDER BY rowid DESC LIMIT ?"
        return self._read(query, (since, limit))[::-1]

    def last(self, table: str) -> dict[str, Any] | None:
        """The newest row of a table."""
        return next(iter(self.rows(table, limit=1)), None)

    def find_decision(
        self, decision_id: str
    ) -> tuple[dict[str, Any], dict[str, Any] | None] | None:
        """Look up a decision by full id or prefix. Returns its document and that of its inputs
        (None if not stored), or None if there is no such decision."""
        pattern = decision_id.replace("%", "").replace("_", "") + "%"
        found_rows = self._read(
            (
                "SELECT document, verdicts, record FROM decisions WHERE id LIKE ? ORDER BY "
                "rowid DESC LIMIT 1"
            ),
            (pattern,),
        )
        if not found_rows or len(pattern) == 1:
            return None
        row = found_rows[0]
        document: dict[str, Any] = json.loads(row["document"]) | {
            name: json.loads(row[name]) for name in _OWN_COLUMNS
        }
        digest = (document.get("record") or {}).get("inputs")
        inputs = self._read("SELECT document FROM inputs WHERE id = ?", (digest,))
        return document, json.loads(inputs[0]["document"]) if inputs else None

    def close(self) -> None:
        """Flush the queue once more and close the file; a later call reopens it."""
        with self._mutex:
            finding = self._write_waiting(_LAST_S) if self._waiting else None
            if self._waiting:
                reason = f"{counted(len(self._waiting), 'row')} could not be written"
                finding = make_finding("ledger_stuck", reason=reason)
            self._disconnect()
        if finding is not None:
            self._report(finding)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def write(self, statement: str, values: Sequence[Any]) -> None:
        """Queue one row and write it as soon as the file accepts it."""
        with self._mutex:
            if len(self._waiting) == _MAX_WAITING:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append((statement, values))
        self.retry()

    @property
    def waiting(self) -> int:
        """Number of queued rows."""
        return len(self._waiting)

    def retry(self) -> None:
        """Write the queued rows once the retry delay has passed."""
        with self._mutex:
            due = bool(self._waiting) and self._monotonic() >= self._retry_at
            finding = self._write_waiting(_HOLD_S) if due else None
        if finding is not None:
            self._report(finding)

    def _write_waiting(self, seconds: float) -> Finding | None:
        """Write queued rows for at most `seconds`; returns a finding to report, if any."""
        until = self._monotonic() + seconds
        try:
            if self._connection is not None and not self.path.exists():
                # The file may have been removed to free space. An open descriptor would keep that
                # space, and rows written to it would be lost.
                self._leave()
            if self._fault == _FULL and not has_room(self.path.parent):
                # A small row may still fit after a larger one failed; that does not end the outage.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            while self._waiting and self._monotonic() <= until:
                self._write_one(self._waiting.popleft())
        except _TROUBLES as error:
            return self._failed(error)
        return self._recovered() if self._fault is not None and not self._waiting else None

    def _write_one(self, row: _Row) -> None:
        try:
            self._trying(lambda db: db.execute(*row))
        except (sqlite3.OperationalError, OSError):
            self._waiting.appendleft(row)
            raise
        except _TROUBLES:
            # The row itself is invalid.
            self._lost += 1
            raise
        self._written += 1
        if self._written % _FORGET_EVERY == 0:
            # An error in the cleanup must not cost the row.
            self._trying(self._forget_old)

    def _failed(self, error: Exception) -> Finding | None:
        """Drop the queued rows if the disk is full; keep them queued after any other error. Each
        outage is reported once."""
        before = self._fault
        if _no_room(error, self.path.parent):
            self._fault = _FULL
            self._lost += len(self._waiting)
            self._waiting.clear()
            return (
                None
                if before == _FULL
                else make_finding("disk_full", what="ledger.sqlite3", reason=str(error))
            )
        self._fault = before or _STUCK
        self._retry_at = self._monotonic() + _RETRY_S
        return make_finding("ledger_stuck", reason=str(error)) if before is None else None

    def _recovered(self) -> Finding:
        fault, lost = self._fault, self._lost
        self._fault, self._lost = None, 0
        if fault == _FULL:
            return make_finding("disk_recovered", what="ledger.sqlite3", lost=lost)
        return make_finding("ledger_recovered", lost=lost)

    def _read(self, query: str, values: Sequence[Any]) -> list[dict[str, Any]]:
        with self._mutex:
            try:
                rows = self._trying(lambda db: db.execute(query, values).fetchall())
            except (sqlite3.Error, OSError) as error:
                self.unread = None if isinstance(error, FileNotFoundError) else str(error)
                return []
        self.unread = None
        return [dict(row) for row in rows]

    def _leave(self) -> None:
        """Close a file that no longer exists, and remove its journal."""
        self._disconnect()
        for leftover in ("-journal", "-wal", "-shm"):
            self.path.with_name(self.path.name + leftover).unlink(missing_ok=True)

    def _trying(self, work: Callable[[sqlite3.Connection], Any]) -> Any:
        """Run `work`; if the file is damaged, set it aside and retry with a new one."""
        try:
            return self._done(work)
        except sqlite3.DatabaseError as error:
            if not any(words in str(error) for words in _DAMAGED):
                raise
            self._disconnect()
            aside = set_aside(self.path)
            self._leave()
            self._report(
                make_finding(
                    "file_set_aside",
                    path=str(self.path),
                    reason=f"damaged ({error})",
                    aside=str(aside),
                )
            )
            return self._done(work)

    def _done(self, work: Callable[[sqlite3.Connection], Any]) -> Any:
        db = self._opened()
        with db:
            return work(db)

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            make_folder(self.path.parent)
            # Create the file first: SQLite copies its mode to the journal.
            os.close(open_private(self.path, os.O_RDWR | os.O_CREAT))
            db = sqlite3.connect(self.path, timeout=_HOLD_S, check_same_thread=False)
            try:
                db.row_factory = sqlite3.Row
                # Not WAL: every process that opens the database would map its -shm, and truncating
                # that file would kill them all with SIGBUS. A rollback journal maps nothing.
                db.execute("PRAGMA journal_mode = DELETE")
                db.execute("PRAGMA synchronous = FULL")
                db.executescript(SCHEMA)
                if db.execute("PRAGMA user_version").fetchone()[0] < VERSION:
                    db.execute(f"PRAGMA user_version = {VERSION}")
                self._forget_old(db)
            except sqlite3.Error:
                db.close()
                raise
            self._connection = db
        return self._connection

    def _forget_old(self, db: sqlite3.Connection) -> None:
        with db:
            for table in TABLES:
                # Measure age from the oldest of the newest rows: this host's clock may be wrong.
                newest = (
                    f"SELECT MIN(wall) FROM (SELECT wall FROM {table} ORDER BY rowid DESC "
                    "LIMIT 100)"
                )
                db.execute(f"DELETE FROM {table} WHERE wall < ({newest}) - ?", (KEPT_S,))
            last = "SELECT MAX(rowid) FROM decisions"
            db.execute(f"DELETE FROM decisions WHERE rowid <= ({last}) - ?", (MAX_DECISIONS,))
            # Keep them for one more day: inputs carry the time of the first decision that named
            # them.
            db.execute("DELETE FROM inputs WHERE wall < (SELECT MIN(wall) FROM decisions) - 86400")
