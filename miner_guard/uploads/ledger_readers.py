"""The ledger in processes that do not write its file: commands that run alongside a guard, and the
guard, which sends its rows to a separate writer process."""

from __future__ import annotations

import sqlite3
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from miner_guard.system.clock import parse_iso_utc
from miner_guard.uploads.ledger import Ledger


class ReadOnlyLedger(Ledger):
    """For commands that run alongside a guard: reads existing files without creating or moving
    any."""

    def since(self, table: str, time: str, *, limit: int) -> list[dict[str, Any]]:
        """The rows since a time in `iso_utc` format; an empty string means all."""
        return self.rows(table, since=parse_iso_utc(time) if time else 0.0, limit=limit)

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            if not self.path.is_file():
                raise FileNotFoundError(f"{self.path} does not exist")
            # A writer that was killed may have left a journal to roll back, which a read-only
            # connection can't do. A file of an earlier version may still be in WAL mode: if its
            # -wal is missing, a reader would leave an empty one behind.
            log = self.path.with_name(f"{self.path.name}-wal")
            wal = _is_wal(self.path)
            how = "mode=rw" if not wal else "mode=ro" if log.exists() else "immutable=1"
            path = urllib.parse.quote(str(self.path.absolute()))
            db = sqlite3.connect(
                f"file:{path}?{how}", uri=True, timeout=2.0, check_same_thread=False
            )
            db.row_factory = sqlite3.Row
            self._connection = db
        return self._connection

    def _trying(self, work: Callable[[sqlite3.Connection], Any]) -> Any:
        return work(self._opened())


def _is_wal(path: Path) -> bool:
    """Return whether a database is in WAL mode (https://www.sqlite.org/fileformat.html, offset
    18)."""
    with open(path, "rb") as file:
        return file.read(20)[18:20] == b"\2\2"


class RemoteLedger(ReadOnlyLedger):
    """For the guard: sends rows to the process that writes its files, and reads the file
    directly."""

    def __init__(self, path: Path, send: Callable[[str, Sequence[Any]], None]) -> None:
        super().__init__(path)
        self._send = send

    def write(self, statement: str, values: Sequence[Any]) -> None:
        """Send one row to the writer."""
        self._send(statement, values)

    def _trying(self, work: Callable[[sqlite3.Connection], Any]) -> Any:
        try:
            return super()._trying(work)
        finally:
            # Between reads, the guard holds nothing that others could truncate or have to wait for.
            self._disconnect()


def read(path: Path, table: str, *, since: str = "", limit: int = 1000) -> list[dict[str, Any]]:
    """`ReadOnlyLedger.since` for a ledger that another process may be writing to; empty if there is
    no file."""
    ledger = ReadOnlyLedger(path)
    try:
        return ledger.since(table, since, limit=limit)
    finally:
        ledger.close()
