"""Stands in for the guard's disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miner_guard.config import LogSettings
from miner_guard.record.emitter import JsonlFile
from miner_guard.record.lines import json_line


class LogOnDisk:
    """guard.jsonl, on a disk that may be full: a log sink that writes at once."""

    def __init__(self, path: Path, settings: LogSettings | None = None) -> None:
        self._file = JsonlFile(path, settings or LogSettings())
        self.full = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Append the record, unless the disk is full."""
        if not self.full:
            self._file.append(json_line(record))
