"""Stand-ins for a simulated guard's measurements and its disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miner_guard.config import LogSettings
from miner_guard.record.emitter import JsonlSink
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
    """guard.jsonl, on a disk that may be full."""

    def __init__(self, path: Path) -> None:
        self._sink = JsonlSink(path, LogSettings())
        self.full = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Append the record, unless the disk is full."""
        if not self.full:
            self._sink.write(record)
