"""Stand-ins for a simulated guard's measurements and its disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miner_guard.config import LogSettings
from miner_guard.record.emitter import JsonlFile
from miner_guard.record.lines import json_line
from miner_guard.watch.base import Context, Monitor


class Source(Monitor):
    """Stands in for a monitor that measures the host, the chain or the guard's cost."""

    def __init__(self, around: Context, name: str, read: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__(around)
        self.name = name
        self._read = read

    def snapshot(self) -> Mapping[str, Any]:
        return self._read()


class LogOnDisk:
    """guard.jsonl, on a disk that may be full: a log sink that writes at once."""

    def __init__(self, path: Path, settings: LogSettings | None = None) -> None:
        self._file = JsonlFile(path, settings or LogSettings())
        self.full = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Append the record, unless the disk is full."""
        if not self.full:
            self._file.append(json_line(record))
