"""What the guard and the process that writes its files say to each other: one line of JSON each.

To the writer: `{"lane": "log", "line": …}`, `{"lane": "files", "path": …, "data": …, "mode": …}`
(in base64; null data removes the file, a null mode writes into the file that is there), `{"lane":
"rows", "statement": …, "values": […]}`, `{"lane": "records", "path": …, "memory": PATH}` (of a
descriptor of the guard's). From it: `{"done": LANE}` for each, in order, and `{"say":
{"event", "level", "rank", "fields"}}`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOG, FILES, ROWS, RECORDS = "log", "files", "rows", "records"
LANES = (LOG, FILES, ROWS, RECORDS)
"""Each is written by a thread of its own: a ledger that is locked holds up no line of the log."""


def line_of(document: dict[str, Any]) -> bytes:
    """One message."""
    return json.dumps(document, default=str).encode("utf-8", "replace") + b"\n"


def log_line(line: str) -> bytes:
    """Append a line to guard.jsonl."""
    return line_of({"lane": LOG, "line": line})


def file(path: Path, data: bytes | None, mode: int | None) -> bytes:
    """Replace a file as a whole, overwrite it in its place (`mode` None), or remove it (`data`
    None)."""
    text = None if data is None else base64.b64encode(data).decode()
    return line_of({"lane": FILES, "path": str(path), "data": text, "mode": mode})


def record(path: Path, memory: str) -> bytes:
    """Bring the copy of a flight record up to date."""
    return line_of({"lane": RECORDS, "path": str(path), "memory": memory})


def row(statement: str, values: Sequence[Any]) -> bytes:
    """Write a row of the ledger."""
    return line_of({"lane": ROWS, "statement": statement, "values": list(values)})
