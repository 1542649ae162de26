"""`miner-guard init --remove`: deletes the files that init wrote and the guard's state, nothing
else."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from miner_guard.cli.echo import echo
from miner_guard.cli.find import listens
from miner_guard.exits import FAILED, Refused
from miner_guard.state_dir import FOLDER, StateDir

_MARK = "ritten by `miner-guard init`"
"""Both templates have this in their first lines, so a file without it was not written by init."""


_OURS = (FOLDER, "state", ".local")
"""Folders above a state directory that the guard creates in an empty home, innermost first."""


def uninstall(files: Sequence[Path], state: StateDir, name: str) -> None:
    """Delete the `files` that init wrote, and the state directory of the guard named `name`. Raises
    Refused (1) while a guard is running there, for a directory without a guard's state, and for
    files that can't be deleted."""
    if listens(state):
        raise Refused(f"a guard is running in {state.root}; stop it first", FAILED)
    if state.root.exists() and not state.log.is_file() and not state.lock.is_file():
        raise Refused(f"{state.root} is not a guard's state directory; nothing was deleted", FAILED)
    try:
        for file in files:
            _delete(file)
        if state.root.exists():
            shutil.rmtree(state.root)
            echo(f"deleted {state.root}")
        _remove_empty(state.root.parent)
    except OSError as error:
        raise Refused(f"{error.filename} cannot be deleted: {error.strerror}", FAILED) from error
    echo("kept: the package (pip uninstall miner-guard) and the guard's lines in .env")
    echo(f"kept: the pm2 entry and log (pm2 delete {name}; pm2 save; rm ~/.pm2/logs/{name}.log*)")


def _remove_empty(folder: Path) -> None:
    """Remove `folder` and then its parents, as long as each is empty and has the next name in
    `_OURS`."""
    for name in _OURS:
        if folder.name != name or not folder.is_dir() or any(folder.iterdir()):
            return
        folder.rmdir()
        folder = folder.parent


def _delete(file: Path) -> None:
    if not file.is_file():
        return
    head = file.read_text(encoding="utf-8", errors="replace")[:500]
    if _MARK not in head:
        echo(f"kept {file}: it was not written by init")
        return
    file.unlink()
    echo(f"deleted {file}")
