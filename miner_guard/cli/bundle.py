"""`miner-guard bundle`: everything a helper asks for, in one archive, secrets removed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from miner_guard import logquery
from miner_guard.cli.exits import FAILED, USAGE, Refused
from miner_guard.cli.options import DEFAULT_NAME, Config, Name, State, open_place


def command(
    output: Annotated[Path, typer.Option("--output", "-o", help="The .tar.gz to write.")],
    since: Annotated[str, typer.Option("--since", help="Events from then on: 1h, 2d, an ISO time (UTC).")] = "2d",
    config: Config = None,
    name: Name = DEFAULT_NAME,
    state_dir: State = None,
) -> None:
    """Collect what a helper asks for, from diagnostics to settings, in one redacted archive with a manifest."""
    from miner_guard.health.bundle import collect, pack
    from miner_guard.redact import Redactor

    place = open_place(config, name, state_dir)
    if not place.state.root.is_dir():
        raise Refused(f"there is no state directory {place.state.root}; give --name or --state-dir", FAILED)
    try:
        earliest = logquery.since_text(since, time.time())
    except ValueError as error:
        raise Refused(f"--since: {error}", USAGE) from error
    alerts, http = place.settings.config.alerts, place.settings.config.http
    known = (*alerts.urls, alerts.heartbeat_url or "", http.token or "")
    files = collect(place.state, earliest, place.settings)
    try:
        manifest = pack(output, files, Redactor.from_environment(os.environ, known))
    except OSError as error:
        raise Refused(f"{output} cannot be written: {error.strerror or error}", FAILED) from error
    for row in manifest["files"]:
        typer.echo(f"{row['bytes']:>9}  {row['name']}  {row['what']}")
    typer.echo(f"wrote {output} ({output.stat().st_size / 1024:.0f} KB); look at it before you share it")
