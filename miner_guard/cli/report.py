"""`miner-guard report`: a page with plots, to read or to send."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from miner_guard import logquery, statedir
from miner_guard.cli.exits import FAILED, USAGE, Refused
from miner_guard.cli.options import DEFAULT_NAME, Config, Name, State, open_place


def command(
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")],
    since: Annotated[str, typer.Option("--since", help="90s, 15m, 1h, 2d, or 2026-01-02T03:04 (UTC).")] = "",
    config: Config = None,
    name: Name = DEFAULT_NAME,
    state_dir: State = None,
) -> None:
    """Write one self-contained HTML page of the run: curves, uploads, costs, incidents, milestones."""
    from miner_guard.health.report import render

    place = open_place(config, name, state_dir)
    if not place.state.root.is_dir():
        raise Refused(f"there is no state directory {place.state.root}; give --name or --state-dir", FAILED)
    try:
        earliest = logquery.since_text(since, time.time()) if since else ""
    except ValueError as error:
        raise Refused(f"--since: {error}", USAGE) from error
    text = render(place.state, gate=place.settings.config.gate, since=earliest)
    try:
        statedir.write_atomic(output, text)
    except OSError as error:
        raise Refused(f"{output} cannot be written: {error.strerror or error}", FAILED) from error
    typer.echo(f"wrote {output} ({len(text.encode()) / 1024:.0f} KB)")
