"""Turns every event into one console line and one line of guard.jsonl, without secrets.

It is a structlog pipeline: a bound logger that knows the run and the host, context variables
(`job`), a list of processors, and a logger that receives the result. docs/architecture.md explains
how to add a processor.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from miner_guard.config import LogSettings
from miner_guard.record.events import LEVELS, Event
from miner_guard.record.lines import console_line
from miner_guard.record.redaction import Redactor
from miner_guard.record.store import event_row
from miner_guard.state_dir import is_at, make_folder, open_private
from miner_guard.system.clock import Clock, OncePer, iso_utc, parse_iso_utc


@contextlib.contextmanager
def _without(name: str) -> Iterator[None]:
    """Let imports in the block do without this optional package, unless it is loaded already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


# For tracebacks on a console, which nobody prints here, structlog would load rich: 60 ms, 5 MB.
with _without("rich"):
    import structlog

Record = MutableMapping[str, Any]
"""A finished event: ts, level, event, msg, run_id, host, rank and its fields."""

Processor = Callable[[Any, str, Record], Record]
"""A structlog processor: takes the logger, the level and a record, and returns the record. To drop
the record it raises `structlog.DropEvent`."""

bound_contextvars = structlog.contextvars.bound_contextvars
"""Adds fields, such as the job, to every event logged inside a `with` block."""


class Sink(Protocol):
    """Receives finished records. `write` must not raise or block for long; any thread may call
    it."""

    def write(self, record: Mapping[str, Any]) -> None: ...


class _SinkLogger:
    """The logger that structlog wraps. It passes each finished record to the sinks."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    def write(self, **record: Any) -> None:
        for sink in self._sinks:
            sink.write(record)

    debug = info = warning = error = critical = write


class Emitter:
    """Adds time, run and host to events, redacts them, and passes the records to the sinks."""

    def __init__(
        self,
        clock: Clock,
        run_id: str,
        redactor: Redactor,
        sinks: list[Sink],
        *,
        processors: Sequence[Processor] = (),
    ) -> None:
        """`processors` receive each record with all its keys in order, before redaction."""
        self._clock = clock
        self._redactor = redactor
        self.sinks = sinks
        self._disk_down = False
        self._log = structlog.wrap_logger(
            _SinkLogger(sinks),
            processors=[
                structlog.contextvars.merge_contextvars,
                self._in_order,
                *processors,
                # Redact last, so that this covers whatever a processor adds.
                self._redact,
            ],
            wrapper_class=structlog.make_filtering_bound_logger(LEVELS["debug"]),
        ).bind(run_id=run_id, host=socket.gethostname())

    def emit(self, event: Event) -> None:
        """Log one event."""
        severity = event.level
        if self._repeats_disk_outage(event):
            return
        log = getattr(self._log, severity)
        log(event.name, msg=event.text, rank=event.rank, **event.fields)

    def _repeats_disk_outage(self, event: Event) -> bool:
        """Return True if the event only repeats that the disk is full or frozen: that stops every
        writer, and the first report covers all of them."""
        was_down = self._disk_down
        if event.name in ("disk_full", "disk_stuck"):
            self._disk_down = event.level != "info"
            if self._disk_down:
                return was_down
            return not was_down and event.fields.get("lost") == 0
        # A single write (`not_stored`) reports a full disk as a field, because it could never
        # report that the disk has recovered; every other failed write names its file.
        return was_down and (event.fields.get("disk_full") is True or "file" in event.fields)

    def _in_order(self, _logger: Any, level: str, record: Record) -> Record:
        """Add time and level, and move the keys that all events share to the front, because readers
        search only the head of a line."""
        stamp = {"ts": iso_utc(self._clock.wall()), "level": level}
        head = {key: record.pop(key) for key in ("event", "msg", "run_id", "host", "rank")}
        return {**stamp, **head, **record}

    def _redact(self, _logger: Any, _level: str, record: Record) -> Record:
        redacted: Record = self._redactor.value(dict(record))
        return redacted


class StoreSink:
    """Writes records to run.db."""

    def __init__(self, write_row: Callable[[str, Sequence[Any]], None]) -> None:
        self._write_row = write_row

    def write(self, record: Mapping[str, Any]) -> None:
        self._write_row(*event_row(record))


_STEP_EVERY_S = 60.0


class ConsoleSink:
    """Prints records of at least the configured level through `write`, one record per call. Of the
    step lines that a miner prints itself, one a minute is enough."""

    def __init__(self, write: Callable[[str], None], settings: LogSettings) -> None:
        self._write = write
        self._emoji = settings.emoji
        self._min_level = LEVELS[settings.level]
        self._steps = OncePer(_STEP_EVERY_S)

    def write(self, record: Mapping[str, Any]) -> None:
        if LEVELS.get(str(record["level"]), 0) < self._min_level:
            return
        if record.get("miner_prints_steps") and not self._steps.ask(parse_iso_utc(record["ts"])):
            return
        self._write(console_line(record, emoji=self._emoji) + "\n")


class JsonlFile:
    """Writes guard.jsonl and rotates it by size. Each line is complete and in exactly one file. Use
    from one thread only."""

    def __init__(self, path: Path, settings: LogSettings) -> None:
        self._path = path
        self._settings = settings
        self._fd: int | None = None
        self._size = 0

    def append(self, line: str) -> None:
        """Write one line of JSON. Raises OSError; then the file holds nothing of that line."""
        data = (line + "\n").encode("utf-8", "replace")
        if self._fd is not None and not is_at(self._path, self._fd):
            # Someone has moved the file, or removed it to free space on a full disk. Writing to it
            # would lose the lines.
            self.close()
        if self._fd is None:
            self._open()
        elif self._size + len(data) > self._settings.max_bytes:
            self._rotate()
        assert self._fd is not None
        rest = memoryview(data)
        try:
            # A short write is no error: the next one says whether the disk is full.
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            # Remove what the disk took, so that every line of the file parses.
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)

    def _open(self) -> None:
        make_folder(self._path.parent)
        self._fd = open_private(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._size = os.fstat(self._fd).st_size
        if self._size and os.pread(self._fd, 1, self._size - 1) != b"\n":
            # A guard was killed while it wrote the last line. End that line, so that the next one
            # starts on a new line.
            self._size += os.write(self._fd, b"\n")

    def _rotate(self) -> None:
        self.close()
        keep = self._settings.keep
        # `guard.jsonl.1` is the newest of the rotated files.
        names = [self._path, *(Path(f"{self._path}.{number}") for number in range(1, keep + 1))]
        for newer, older in reversed(list(itertools.pairwise(names))):
            if newer.exists():
                os.replace(newer, older)
        if keep == 0:
            self._path.unlink(missing_ok=True)
        self._open()

    def close(self) -> None:
        """Close the file; a later write opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
