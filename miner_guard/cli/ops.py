"""`miner-guard ops DIR`: copies the on-call files to a folder where you can edit them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from miner_guard.cli.echo import echo
from miner_guard.exits import FAILED, UNAVAILABLE, USAGE, Refused
from miner_guard.reporting.runbook import FILE, installed


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
) -> None:
    """Write ops/: runbook, systemd unit, Dockerfile, dashboards, alert rules."""
    source = installed()
    if source is None:
        raise Refused(
            "this installation has no ops/ files; install miner-guard from a wheel or from source",
            UNAVAILABLE,
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"{folder} exists and is not an empty folder; choose another", USAGE)
    try:
        shutil.copytree(source, folder, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        raise Refused(f"{folder} cannot be written: {error}", FAILED) from error
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        echo(f"wrote {path}")
    echo(f"next: {folder / FILE} explains what to do about each event")
