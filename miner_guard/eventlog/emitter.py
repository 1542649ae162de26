"""structlog: every finding becomes one console line and one JSON line, secrets removed before
either."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Protocol

from miner_guard.config import LogSettings
from miner_guard.eventlog import catalog
from miner_guard.eventlog.catalog import CATALOGUE, LEVELS, Finding, make_finding, write_failed
from miner_guard.eventlog.redact import Redactor
from miner_guard.eventlog.rendering import console_line, json_line, rotate
from miner_guard.state_dir import has_room, is_at, make_folder, open_private
from miner_guard.system.clock import Clock, iso_utc
from miner_guard.system.lazy_import import block_import

with block_import("rich"):
    # Half of structlog's import is rich, for a console renderer that the guard has no use for.
    import structlog

Record = MutableMapping[str, Any]
"""A finished event: ts, level, event, msg, run_id, host, rank and its fields."""


class Sink(Protocol):
    """Takes finished records. Must not raise, must not block for long, may be called from any
    thread."""

    def write(self, record: Mapping[str, Any]) -> None: ...


class Emitter:
    """Where findings leave the pure part: adds time, run and host, redacts, hands on to the
    sinks."""

    def __init__(self, clock: Clock, run_id: str, redactor: Redactor, sinks: list[Sink]) -> None:
        self._clock = clock
        self._redactor = redactor
        self.sinks = sinks
        self._disk_full = False
        self._log = structlog.wrap_logger(
            None,
            processors=[self._stamp, self._redact, self._deliver],
            context_class=dict,
            wrapper_class=structlog.BoundLoggerBase,
        ).bind(run_id=run_id, host=socket.gethostname())

    def emit(self, finding: Finding) -> None:
        """Log one finding. An event that the catalogue lacks raises KeyError: that is a defect of
        ours."""
        spec = CATALOGUE[finding.event]
        if self._said_of_the_disk(finding):
            return
        fields = dict(finding.fields)
        self._log._proxy_to_logger(
            "msg",
            catalog.message(finding),
            _event=spec,
            _level=finding.severity,
            _rank=finding.rank,
            _fields=fields,
        )

    def _said_of_the_disk(self, finding: Finding) -> bool:
        """Whether it adds nothing: a full disk stops every writer, and the first that says so
        speaks for all."""
        known = self._disk_full
        if finding.event == "disk_full":
            self._disk_full = True
            return known
        if finding.event == "disk_recovered":
            self._disk_full = False
            return not known and finding.fields.get("lost") == 0
        # What is written once says it as a field: it would never say that the disk recovered.
        return known and finding.fields.get("disk_full") is True

    def _stamp(
        self, _logger: Any, _method: str, bound: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        return {
            "ts": iso_utc(self._clock.wall()),
            "level": bound["_level"],
            "event": bound["_event"].name,
            "msg": bound["event"],
            "run_id": bound["run_id"],
            "host": bound["host"],
            "rank": bound["_rank"],
            **bound["_fields"],
        }

    def _redact(
        self, _logger: Any, _method: str, record: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        redacted: MutableMapping[str, Any] = self._redactor.value(dict(record))
        return redacted

    def _deliver(self, _logger: Any, _method: str, record: MutableMapping[str, Any]) -> Any:
        for sink in self.sinks:
            sink.write(record)
        raise structlog.DropEvent


class ConsoleSink:
    """Prints records from a level on through `write`, one whole line at a time."""

    def __init__(self, write: Callable[[str], None], settings: LogSettings) -> None:
        self._write = write
        self._emoji = settings.emoji
        self._least = LEVELS[settings.level]

    def write(self, record: Mapping[str, Any]) -> None:
        if LEVELS.get(str(record["level"]), 0) >= self._least:
            self._write(console_line(record, emoji=self._emoji) + "\n")


class JsonlSink:
    """guard.jsonl, rotated by size; a line is in exactly one file, whole.

    Where the disk refuses, lines are counted as lost and writing is tried again with each line: the
    miner's life does not depend on it. `say` is told when it stops and when it works again.
    """

    def __init__(
        self, path: Path, settings: LogSettings, say: Callable[[Finding], None] = lambda _f: None
    ) -> None:
        self._path = path
        self._settings = settings
        self._say = say
        self._mutex = threading.Lock()
        self._fd: int | None = None
        self._size = 0
        self._lost = 0

    def write(self, record: Mapping[str, Any]) -> None:
        data = (json_line(record) + "\n").encode("utf-8", "replace")
        said: Finding | None = None
        with self._mutex:
            try:
                self._append(data)
                if self._lost:
                    said, self._lost = (
                        make_finding("disk_recovered", what=self._path.name, lost=self._lost),
                        0,
                    )
            except OSError as error:
                if self._lost == 0:
                    said = write_failed(self._path.name, error)
                self._lost += 1
        if said is not None:
            self._say(said)

    def _append(self, data: bytes) -> None:
        if self._fd is not None and not is_at(self._path, self._fd):
            # Removed to make room on a full disk, or moved: what is written into it now nobody
            # would find.
            os.close(self._fd)
            self._fd = None
        if self._fd is None:
            self._open()
        elif self._size + len(data) > self._settings.max_bytes:
            self._rotate()
        assert self._fd is not None
        if self._lost and not has_room(self._fd):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(self._fd, data)
        if written != len(data):
            # Half a line on a full disk: take it back, so that every line of the file parses.
            os.ftruncate(self._fd, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written

    def _open(self) -> None:
        make_folder(self._path.parent)
        self._fd = open_private(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._size = os.fstat(self._fd).st_size
        if self._size and os.pread(self._fd, 1, self._size - 1) != b"\n":
            # A guard that was killed in mid-line: end that line, so that ours starts on its own.
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
