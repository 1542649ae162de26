"""Before a guard uses its state directory: what bears one of its names but is of another kind is set aside.

A folder in place of a socket, a pipe in place of a file, a link to nowhere: opening one would fail, or wait for ever.
Damaged content of the right kind is the reader's own concern (`Flights`, the ledger, `read_json`).
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from miner_guard.events import Finding, found
from miner_guard.statedir import StateDir, set_aside

_KINDS = {
    stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
_RANKS_OWN = re.compile(r"rank-\d+\.(?:bin|stacks|collectives)")


def tidy(state: StateDir) -> list[Finding]:
    """Set aside what is of another kind than its name says. For the holder of the lock, before any file is opened."""
    findings: list[Finding] = []
    # Folders first: what is inside them can't be seen before.
    for path, kind in itertools.chain(_folders(state), _within(state)):
        reason = wrong_kind(path, kind) or _not_ours(path)
        if reason is not None:
            findings.append(put_away(path, reason))
    return findings


def wrong_kind(path: Path, kind: int) -> str | None:
    """Why `path` is not of `kind` (`stat.S_IFREG` …); None where it is, or is not there."""
    try:
        seen = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return "a link to nowhere" if path.is_symlink() else None
    except OSError as error:
        return f"unreadable ({error.strerror})"
    return None if seen == kind else f"{_KINDS.get(seen, 'of no known kind')} where {_KINDS[kind]} belongs"


def put_away(path: Path, reason: str) -> Finding:
    """Rename `path`; what there is to say of it."""
    try:
        return found("file_set_aside", path=str(path), reason=reason, aside=str(set_aside(path)))
    except OSError as error:
        what = f"{path} is {reason} and can't be renamed ({error.strerror}); move it away by hand"
        return found("guard_degraded", what=what)


def _not_ours(path: Path) -> str | None:
    """A file of an earlier guard that ran as another user."""
    return "not this user's to read and write" if path.exists() and not os.access(path, os.R_OK | os.W_OK) else None


def _folders(state: StateDir) -> Iterator[tuple[Path, int]]:
    for path in (state.flight, state.incidents, state.costs.parent):
        yield path, stat.S_IFDIR


def _within(state: StateDir) -> Iterator[tuple[Path, int]]:
    for path in (
        state.log,
        state.gate_inputs,
        state.status,
        state.costs,
        state.ledger,
        state.host_memory,
        state.roster,
    ):
        yield path, stat.S_IFREG
    for path in (state.socket, state.control):
        yield path, stat.S_IFSOCK
    if state.flight.is_dir():
        for path in sorted(state.flight.iterdir()):
            if _RANKS_OWN.fullmatch(path.name):
                yield path, stat.S_IFREG
