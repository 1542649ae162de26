"""`miner-guard bundle`: packs everything that support asks for into one archive and removes
secrets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from miner_guard.cli import options
from miner_guard.cli.echo import echo
from miner_guard.cli.files import writing
from miner_guard.cli.find import open_guard


def command(
    output: Annotated[Path, typer.Option("--output", "-o", help="The .tar.gz to write.")],
    since: options.Since = "2d",
    config: options.Config = None,
    name: options.AnyName = None,
    state_dir: options.State = None,
) -> None:
    """Collect everything that support asks for, from diagnostics to settings, in one redacted
    archive with a manifest."""
    from miner_guard.cli.working import Working
    from miner_guard.record.redaction import Redactor
    from miner_guard.reporting.bundle import collect, pack
    from miner_guard.uploads.repos.credentials import beside

    place = open_guard(config, name, state_dir)
    earliest = options.earliest(since)
    options.check_there(place.state)
    files = collect(place.state, earliest, place.settings)
    settings = place.settings.config
    redactor = Redactor.for_guard(beside(os.environ, settings.repo), settings)
    with writing(output), Working("collecting and redacting"):
        manifest = pack(output, files, redactor)
    for row in manifest["files"]:
        echo(f"{row['bytes']:>9}  {row['name']}  {row['what']}")
    echo(f"wrote {output} ({output.stat().st_size / 1024:.0f} KB); review it before you share it")
