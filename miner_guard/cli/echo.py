"""All command output goes through here, so that no text from a log or a state file can send control
sequences to a terminal."""

from __future__ import annotations

import typer

from miner_guard.record.words import visible


def echo(text: str, *, err: bool = False) -> None:
    """Print `text` and a newline on stdout, or on stderr if `err`. Escapes control characters, so
    that JSON stays valid."""
    typer.echo(visible(text), err=err)
