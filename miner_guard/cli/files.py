"""Opens the files named on the command line: logs to read, and pages and archives to write."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from miner_guard.exits import FAILED, USAGE, Refused


@contextmanager
def open_text(source: str, what: str, newline: str | None = None) -> Iterator[TextIO]:
    """Open a text file, or standard input for `-`. `what` names the kind of file that the command
    expects. Raises Refused (64) if the file can't be read."""
    if source == "-":
        sys.stdin.reconfigure(errors="replace", newline=newline)  # type: ignore[union-attr]
        yield sys.stdin
        return
    try:
        with Path(source).open(encoding="utf-8", errors="replace", newline=newline) as file:
            yield file
    except OSError as error:
        reason = error.strerror or str(error)
        raise Refused(
            f"{source}: cannot be read: {reason}; pass {what}, or - for stdin", USAGE
        ) from error


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Raises Refused (1) if `output` cannot be written."""
    try:
        yield
    except OSError as error:
        raise Refused(f"{output} cannot be written: {error.strerror or error}", FAILED) from error
