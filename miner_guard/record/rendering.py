"""Renders a record as a console line or as a line of JSON, and rotates log files. Standard library
only, so that commands that read logs start quickly."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miner_guard.record.words import visible
from miner_guard.state_dir import finite


def console_line(record: Mapping[str, Any], *, emoji: bool) -> str:
    """Format a record as `2026-01-02T03:04:05.678Z | WARNING | Rank 2 | ⚠️  SLOW STEP: …`. If the
    message is a block, its other lines follow unchanged."""
    who = "guard" if record.get("rank") is None else f"Rank {record['rank']}"
    mark = f"{_mark(record)} ".lstrip() if emoji else ""
    # Write "CRITICAL ERROR", so that `grep -i "error"` finds critical lines too.
    level = "CRITICAL ERROR" if record["level"] == "critical" else str(record["level"]).upper()
    stamp = str(record["ts"])
    head, _, rest = visible(str(record["msg"])).partition("\n")
    if head.startswith("====") and rest:
        # A block from a source document opens with a rule; put the emoji in front of its title.
        title, _, body = rest.partition("\n")
        return f"{head}\n{mark}{title}\n{body}"
    text = f"{stamp[:23]}Z | {level} | {who} | {mark}{head}"
    return f"{text}\n{rest}" if rest else text


_MARKS = {
    **dict.fromkeys(("guard_started", "guard_stopped"), "🛡️ "),
    **dict.fromkeys(("gpu_diagnostics", "preflight", "no_step_yet"), "🔍"),
    **dict.fromkeys(("fast_log", "timing_breakdown", "step_summary"), "⏱️ "),
    **dict.fromkeys(("upload_started", "upload_reported", "checkpoint_saved"), "💾"),
    **dict.fromkeys(("upload_allowed", "upload_succeeded", "audit_passed"), "✅"),
    **dict.fromkeys(("miner_finished", "checkpoint_resumed"), "✅"),
    **dict.fromkeys(("straggler", "network_unreachable"), "✅"),
    "last_checkpoint": "💾",
    "miner_started": "🚀",
    "state_dir_tightened": "🔒",
}
"""The emoji of events at level info; those of the other levels depend on the level alone."""


def _mark(record: Mapping[str, Any]) -> str:
    name, level = str(record["event"]), str(record["level"])
    if level in ("error", "critical"):
        return "❌"
    if level == "warning":
        return "⚠️ "
    return "✅" if name.endswith(("_recovered", "_cleared", "_relaxed")) else _MARKS.get(name, "")


def json_line(record: Mapping[str, Any], default: Callable[[Any], Any] = str) -> str:
    """Format the record as one line of JSON. Non-finite numbers become null; `default` converts
    values that JSON cannot express."""
    return visible(
        json.dumps(finite(record), ensure_ascii=False, default=default, separators=(", ", ": "))
    )


def rotated(path: Path, number: int) -> Path:
    """The path of rotated file `number`; `guard.jsonl.1` is the newest."""
    return path.with_name(f"{path.name}.{number}")


def rotate(path: Path, keep: int) -> None:
    """Increase the number of every rotated file by one and make the current file number 1. Keeps
    `keep` rotated files. Raises OSError."""
    for number in range(keep, 0, -1):
        older = rotated(path, number)
        newer = rotated(path, number - 1) if number > 1 else path
        if newer.exists():
            os.replace(newer, older)
    if keep == 0:
        path.unlink(missing_ok=True)
