"""incidents/: one evidence folder per hang or incident; only the newest are kept."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from pathlib import Path

from miner_guard.state_dir import StateDir

_OURS = re.compile(r"\d{8}T\d{6}-\w+")


def folder(state: StateDir, wall_s: float, label: str) -> Path:
    """Return `incidents/YYYYMMDDTHHMMSS-LABEL`, in UTC, without creating the folder."""
    return state.incidents / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(wall_s))}-{label}"


def prune(state: StateDir, keep: int) -> None:
    """Remove all but the newest `keep` evidence folders; leave other names alone. Raises
    OSError."""
    if not state.incidents.is_dir():
        return
    ours = sorted(path for path in state.incidents.iterdir() if _OURS.fullmatch(path.name))
    for path in ours[: max(0, len(ours) - keep)]:
        if path.is_dir() and not path.is_symlink():
            # Another job thread may prune at the same time.
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)
