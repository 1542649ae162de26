"""structlog: every finding becomes one console line and one JSON line, after secrets are
removed.

The pipeline is structlog's: a bound logger that knows run and host, context variables (`job`), a
list of processors, a logger that receives the result. docs/architecture.md says how to add a
processor.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

from miner_guard.config import LogSettings
from miner_guard.eventlog import catalog
from miner_guard.eventlog.catalog import LEVELS, Finding
from miner_guard.eventlog.redact import Redactor
from miner_guard.eventlog.rendering import console_line, json_line
from miner_guard.system.clock import Clock, iso_utc
from miner_guard.system.lazy_import import block_import, defer_import

with block_import("rich"), defer_import("asyncio", current_task=lambda: None):
    # Three quarters of structlog's import, for a console renderer and async methods that the guard
    # does not use. From Python 3.12 on a log record asks for the current task.
    import structlog

Record = MutableMapping[str, Any]
"""A finished event: ts, level, event, msg, run_id, host, rank and its fields."""

Processor = Callable[[Any, str, Record], Record]
"""Of structlog: takes the logger, the level and a record; returns the record. `structlog.DropEvent`
drops it."""

bound_contextvars = structlog.contextvars.bound_contextvars
"""Adds fields to every event of a `with` block, such as the job that it comes from."""

_render = structlog.processors.JSONRenderer(serializer=json_line, default=str)


def render_json(record: Mapping[str, Any]) -> str:
    """The line of guard.jsonl, without its newline."""
    return str(_render(None, str(record.get("level")), dict(record)))


class Sink(Protocol):
    """Takes finished records. Must not raise or block for long; may be called from any thread."""

    def write(self, record: Mapping[str, Any]) -> None: ...


class _SinkLogger:
    """The logger that structlog wraps: hands each finished record to the sinks."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    def write(self, **record: Any) -> None:
        for sink in self._sinks:
            sink.write(record)

    debug = info = warning = error = critical = write


class Emitter:
    """Where findings leave the pure code: adds time, run and host, redacts, and passes records to
    the sinks."""

    def __init__(
        self,
        clock: Clock,
        run_id: str,
        redactor: Redactor,
        sinks: list[Sink],
        *,
        processors: Sequence[Processor] = (),
    ) -> None:
        """`processors` see each record complete and in order, before it is redacted."""
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
                # Last: nothing that a processor adds escapes it.
                self._redact,
            ],
            wrapper_class=structlog.make_filtering_bound_logger(LEVELS["debug"]),
        ).bind(run_id=run_id, host=socket.gethostname())

    def emit(self, finding: Finding) -> None:
        """Log one finding. Raises KeyError for an event missing from the catalogue: a bug of
        ours."""
        severity = finding.severity
        if self._said_of_the_disk(finding):
            return
        log = getattr(self._log, severity)
        log(finding.event, msg=catalog.message(finding), rank=finding.rank, **finding.fields)

    def _said_of_the_disk(self, finding: Finding) -> bool:
        """Whether the finding is redundant: a full or frozen disk stops every writer, and the first
        report covers all."""
        known = self._disk_down
        if finding.event in ("disk_full", "disk_stuck"):
            self._disk_down = True
            return known
        if finding.event == "disk_recovered":
            self._disk_down = False
            return not known and finding.fields.get("lost") == 0
        # A one-time write reports it as a field, because it could never report that the disk
        # recovered.
        return known and finding.fields.get("disk_full") is True

    def _in_order(self, _logger: Any, level: str, record: Record) -> Record:
        """Time and level, and first the keys that every event has: readers search the head of a
        line."""
        known = {"ts": iso_utc(self._clock.wall()), "level": level}
        head = {key: record.pop(key) for key in ("event", "msg", "run_id", "host", "rank")}
        return {**known, **head, **record}

    def _redact(self, _logger: Any, _level: str, record: Record) -> Record:
        redacted: Record = self._redactor.value(dict(record))
        return redacted


class ConsoleSink:
    """Prints records of at least a given level through `write`, one whole line at a time."""

    def __init__(self, write: Callable[[str], None], settings: LogSettings) -> None:
        self._write = write
        self._emoji = settings.emoji
        self._least = LEVELS[settings.level]

    def write(self, record: Mapping[str, Any]) -> None:
        if LEVELS.get(str(record["level"]), 0) >= self._least:
            self._write(console_line(record, emoji=self._emoji) + "\n")
