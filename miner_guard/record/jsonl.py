"""Writes guard.jsonl in whole lines, rotates it by size, and copes with a full disk."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miner_guard.config import LogSettings
from miner_guard.record.events import Event
from miner_guard.record.rendering import json_line, rotate
from miner_guard.record.write_errors import WriteOutage
from miner_guard.state_dir import has_room, is_at, make_folder, open_private


class JsonlSink:
    """Writes guard.jsonl and rotates it by size. Each line is complete and in exactly one file.

    If a write fails, that line counts as lost, and the sink tries to write the next one as usual;
    the miner is not affected. `report` receives an event when writing stops and when it works
    again.
    """

    def __init__(
        self, path: Path, settings: LogSettings, report: Callable[[Event], None] = lambda _f: None
    ) -> None:
        self._path = path
        self._settings = settings
        self._report = report
        self._mutex = threading.Lock()
        self._fd: int | None = None
        self._size = 0
        self._outage = WriteOutage(path.name)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one record."""
        self.append(json_line(record))

    def append(self, line: str) -> None:
        """Write one line of JSON; never raises OSError."""
        data = (line + "\n").encode("utf-8", "replace")
        with self._mutex:
            try:
                self._append(data)
                event = self._outage.succeeded()
            except OSError as error:
                event = self._outage.failed(error)
        if event is not None:
            self._report(event)

    def _append(self, data: bytes) -> None:
        if self._fd is not None and not is_at(self._path, self._fd):
            # Someone has moved the file, or removed it to free space on a full disk. Writing to it
            # would lose the lines.
            os.close(self._fd)
            self._fd = None
        if self._fd is None:
            self._open()
        elif self._size + len(data) > self._settings.max_bytes:
            self._rotate()
        assert self._fd is not None
        if self._outage.ongoing and not has_room(self._fd):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(self._fd, data)
        if written != len(data):
            # The full disk accepted only part of the line. Remove that part, so that every line of
            # the file parses.
            os.ftruncate(self._fd, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written

    def _open(self) -> None:
        make_folder(self._path.parent)
        self._fd = open_private(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._size = os.fstat(self._fd).st_size
        if self._size and os.pread(self._fd, 1, self._size - 1) != b"\n":
            # A guard was killed while it wrote the last line. End that line, so that the next one
            # starts on a new line.
            self._size += os.write(self._fd, b"\n")

    def _rotate(self) -> None:
        assert self._fd is not None
        os.close(self._fd)
        self._fd = None
        rotate(self._path, self._settings.keep)
        self._open()

    def close(self) -> None:
        """Close the file; a later write opens it again."""
        with self._mutex:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
