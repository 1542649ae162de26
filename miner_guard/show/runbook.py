"""The runbook's rows for events. The report and `miner-guard explain EVENT` show them, because the
person on call may have neither the source tree nor network access."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

FILE = "runbook.md"
"""The file whose presence identifies the folder of ops/ files."""

_ROW = re.compile(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", re.MULTILINE)


@dataclass(frozen=True)
class RunbookRow:
    """The runbook's entry for one event. Text between backticks is a command or a log line."""

    event: str
    grep: str
    meaning: str
    action: str


@functools.cache
def rows() -> Mapping[str, RunbookRow]:
    """The rows by event; empty if this installation has no runbook."""
    folder = installed()
    if folder is None:
        return {}
    text = (folder / FILE).read_text(encoding="utf-8")
    return {row.event: row for row in (RunbookRow(*cells) for cells in _ROW.findall(text))}


def installed() -> Path | None:
    """This installation's folder of ops/ files: in its source tree, or where pip put it."""
    return next((folder for folder in _candidates() if (folder / FILE).is_file()), None)


def _candidates() -> Iterator[Path]:
    beside = Path(__file__).resolve().parents[2]
    yield beside / "ops"
    # `pip install --target` moves the wheel's data next to the packages.
    yield beside / "share" / "miner-guard" / "ops"
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files("miner-guard") or ():
            if file.parts[-2:] == ("ops", FILE):
                yield Path(str(file.locate())).resolve().parent
