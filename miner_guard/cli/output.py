"""What commands print and the files they open. All output goes through `echo`, so that no text from
a log or a state file can send control sequences to a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TextIO

import typer

from miner_guard.exits import FAILED, USAGE, Refused
from miner_guard.record.words import visible


def echo(text: str, *, err: bool = False) -> None:
    """Print `text` and a newline. Escapes control characters, so that JSON stays valid."""
    typer.echo(visible(text), err=err)


def working(what: str) -> AbstractContextManager[Any]:
    """Show a spinner on a terminal's standard error while a slow command works."""
    if not sys.stderr.isatty():
        return contextlib.nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(what)


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
