"""structlog: every finding becomes one console line and one JSON line, after secrets are
removed."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol

from miner_guard.config import LogSettings
from miner_guard.eventlog import catalog
from miner_guard.eventlog.catalog import CATALOGUE, LEVELS, Finding
from miner_guard.eventlog.redact import Redactor
from miner_guard.eventlog.rendering import console_line
from miner_guard.system.clock import Clock, iso_utc
from miner_guard.system.lazy_import import block_import

with block_import("rich"):
    # rich makes up half of structlog's import, for a console renderer that the guard does not use.
    import structlog

Record = MutableMapping[str, Any]
"""A finished event: ts, level, event, msg, run_id, host, rank and its fields."""


class Sink(Protocol):
    """Takes finished records. Must not raise or block for long; may be called from any thread."""

    def write(self, record: Mapping[str, Any]) -> None: ...


class Emitter:
    """Where findings leave the pure code: adds time, run and host, redacts, and passes records to
    the sinks."""

    def __init__(self, clock: Clock, run_id: str, redactor: Redactor, sinks: list[Sink]) -> None:
        self._clock = clock
        self._redactor = redactor
        self.sinks = sinks
        self._disk_down = False
        self._log = structlog.wrap_logger(
            None,
            processors=[self._stamp, self._redact, self._deliver],
            context_class=dict,
            wrapper_class=structlog.BoundLoggerBase,
        ).bind(run_id=run_id, host=socket.gethostname())

    def emit(self, finding: Finding) -> None:
        """Log one finding. Raises KeyError for an event missing from the catalogue: a bug of
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
    """Prints records of at least a given level through `write`, one whole line at a time."""

    def __init__(self, write: Callable[[str], None], settings: LogSettings) -> None:
        self._write = write
        self._emoji = settings.emoji
        self._least = LEVELS[settings.level]

    def write(self, record: Mapping[str, Any]) -> None:
        if LEVELS.get(str(record["level"]), 0) >= self._least:
            self._write(console_line(record, emoji=self._emoji) + "\n")
