"""`miner-guard report`: an HTML page with plots, to read or to share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from miner_guard import state_dir as statedir
from miner_guard.cli import options
from miner_guard.cli.echo import echo
from miner_guard.cli.files import writing
from miner_guard.cli.find import open_guard


def command(
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")],
    since: options.Since = "",
    config: options.Config = None,
    name: options.AnyName = None,
    state_dir: options.State = None,
) -> None:
    """Write one self-contained HTML page about the run: curves, uploads, costs, incidents,
    milestones."""
    from miner_guard.cli.working import Working
    from miner_guard.record.store import RunReader
    from miner_guard.reporting.report import render
    from miner_guard.system.clock import parse_iso_utc

    place = open_guard(config, name, state_dir)
    earliest = options.earliest(since)
    options.check_there(place.state)
    pushes = RunReader(place.state.db).rows(
        "upload", since=parse_iso_utc(earliest) if earliest else 0.0
    )
    with Working(f"reading {place.state.db}"):
        text = render(place.state, gate=place.settings.config.gate, since=earliest, pushes=pushes)
    with writing(output):
        statedir.write_atomic(output, text, 0o666)
    echo(f"wrote {output} ({len(text.encode()) / 1024:.0f} KB)")
