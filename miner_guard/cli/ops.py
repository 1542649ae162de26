"""`miner-guard ops DIR`: the files for people on call, written where they can be edited."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from miner_guard.cli.echo import echo
from miner_guard.exits import FAILED, UNAVAILABLE, USAGE, Refused

_MARK = "runbook.md"
"""Identifies the folder of ops/ files, which contains it."""


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for them.")],
) -> None:
    """Write ops/: runbook, systemd unit, Dockerfile, dashboards, alert rules."""
    source = installed()
    if source is None:
        raise Refused(
            "this installation has no ops/ files; install miner-guard from its wheel or its tree",
            UNAVAILABLE,
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"{folder} exists and is not an empty folder; name a new one", USAGE)
    try:
        shutil.copytree(source, folder, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        raise Refused(f"{folder} cannot be written: {error}", FAILED) from error
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        echo(f"wrote {path}")
    echo(f"next: {folder / _MARK} says what each event asks for")


def installed() -> Path | None:
    """This installation's folder of ops/ files: in its source tree, or where pip put it."""
    return next((folder for folder in _candidates() if (folder / _MARK).is_file()), None)


def _candidates() -> Iterator[Path]:
    beside = Path(__file__).resolve().parents[2]
    yield beside / "ops"
    # `pip install --target` moves the wheel's data next to the packages.
    yield beside / "share" / "miner-guard" / "ops"
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files("miner-guard") or ():
            if file.parts[-2:] == ("ops", _MARK):
                yield Path(str(file.locate())).resolve().parent
