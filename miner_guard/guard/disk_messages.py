"""Messages between the guard and the process that writes its files: one line of JSON each.

To the writer: `{"lane": "log", "line": …}`, `{"lane": "files", "path": …, "data": …, "mode": …}`
(data in base64; null data removes the file, a null mode overwrites the existing file in place),
`{"lane": "rows", "statement": …, "values": […]}`, `{"lane": "records", "path": …, "memory": PATH}`
(the path of one of the guard's descriptors). From the writer: `{"done": LANE}` for each message, in
order, and `{"say": {"event", "level", "rank", "fields"}}`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOG, FILES, ROWS, RECORDS = "log", "files", "rows", "records"
LANES = (LOG, FILES, ROWS, RECORDS)
"""A separate thread writes each lane, so that a locked ledger does not delay the log."""


def line_of(document: dict[str, Any]) -> bytes:
    """Encode one message."""
    return json.dumps(document, default=str).encode("utf-8", "replace") + b"\n"


def log_line(line: str) -> bytes:
    """Build the message that appends a line to guard.jsonl."""
    return line_of({"lane": LOG, "line": line})


def file(path: Path, data: bytes | None, mode: int | None) -> bytes:
    """Build the message that replaces an entire file, overwrites it in place (`mode` is None) or
    removes it (`data` is None)."""
    text = None if data is None else base64.b64encode(data).decode()
    return line_of({"lane": FILES, "path": str(path), "data": text, "mode": mode})


def record(path: Path, memory: str) -> bytes:
    """Build the message that updates the copy of a flight record at `path`; `memory` is the path of
    the record's descriptor."""
    return line_of({"lane": RECORDS, "path": str(path), "memory": memory})


def row(statement: str, values: Sequence[Any]) -> bytes:
    """Build the message that writes a ledger row."""
    return line_of({"lane": ROWS, "statement": statement, "values": list(values)})
