"""Prepares the state directory: revokes other users' access and sets aside files of the wrong type.

Opening a folder in place of a socket, a pipe in place of a file, or a dangling link would fail or
hang. A file of the right type with damaged content is left to its readers (`Flights`, the store,
`read_json`)."""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from miner_guard.record.events import Event, degraded, event
from miner_guard.state_dir import (
    PRIVATE_FILE,
    PRIVATE_FOLDER,
    StateDir,
    foreign_link,
    set_aside,
    tighten,
)

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_RANKS_OWN = re.compile(r"rank-\d+\.(?:stacks|collectives)|early-\d+\.stacks")


def check_state_dir(state: StateDir) -> list[Event]:
    """Make the directory private, and set aside everything whose file type does not match its name.

    Call this while holding the lock, before opening any file in the directory.
    """
    events = list(make_private(state))
    # Check the folders first: the guard cannot check the contents of something that is not a
    # folder.
    for path, kind in itertools.chain(_folders(state), _within(state)):
        reason = wrong_kind(path, kind) or _not_ours(path)
        if reason is not None:
            events.append(set_aside_foreign(path, reason))
    return events


def make_private(state: StateDir) -> Iterator[Event]:
    """Restrict access to this user: mode 0700 for the directory, 0600 for each of the guard's files
    in it."""
    try:
        before = _tighten(state.root)
        if before is not None:
            yield event(
                "state_dir_tightened",
                "info",
                f"STATE DIRECTORY TIGHTENED: {state.root} was open to other users (mode "
                f"{before:04o}), now 0700",
                path=str(state.root),
                mode=f"{before:04o}",
            )
        # The directory's mode alone would suffice, but a later chmod of the directory or a copy of
        # it must not expose the files.
        for path in _own(state):
            _tighten(path)
    except OSError as error:
        what = f"other users can read {error.filename or state.root}: {error.strerror}"
        yield degraded(f"{what}; use --state-dir to choose a directory that this user owns")


def _tighten(path: Path) -> int | None:
    """Apply `state_dir.tighten` to a path; returns what it returns. Skips symlinks, sockets and
    files that this user has no permission to open."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        # `_not_ours` reports unreadable files.
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            return None
        raise
    try:
        seen = os.fstat(fd).st_mode
        if seen & stat.S_ISVTX:
            raise OSError(errno.EPERM, "it is shared by the users of this host (sticky)", str(path))
        return tighten(fd, PRIVATE_FOLDER if stat.S_ISDIR(seen) else PRIVATE_FILE)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(fd)


def _own(state: StateDir) -> Iterator[Path]:
    """The guard's files and folders in the state directory, including rotated files and those set
    aside."""
    named = (*(path for path, _ in _within(state)), state.lock, state.shapes)
    names = tuple(path.name for path in named)
    for entry in sorted(state.root.iterdir()):
        if entry.name.startswith(names):
            yield entry
    for folder, _ in _folders(state):
        yield folder
        for where, folders, files in os.walk(folder):
            yield from (Path(where, name) for name in (*folders, *files))


def wrong_kind(path: Path, kind: int) -> str | None:
    """Return why `path` is not of type `kind` (`stat.S_IFREG` …); None if it is of that type or
    does not exist."""
    if (owner := foreign_link(path)) is not None:
        return f"a symlink owned by uid {owner}"
    try:
        seen = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return "a dangling symlink" if path.is_symlink() else None
    except OSError as error:
        return f"unreadable ({error.strerror})"
    return (
        None
        if seen == kind
        else f"{_KINDS.get(seen, 'a file of unknown type')} where {_KINDS[kind]} belongs"
    )


def set_aside_foreign(path: Path, reason: str) -> Event:
    """Rename `path` out of the way; returns the event to report."""
    try:
        aside = set_aside(path)
        return event(
            "file_set_aside",
            "warning",
            f"FILE SET ASIDE: {path} was {reason}, now {aside}",
            path=str(path),
            reason=reason,
            aside=str(aside),
        )
    except OSError as error:
        what = (
            f"{path} is {reason} and renaming it failed ({error.strerror}); move it out of the way"
        )
        return degraded(what)


def _not_ours(path: Path) -> str | None:
    """Return why this user can't use the file, which another user's guard may have left; None if
    the file is readable and writable, or does not exist."""
    return (
        "not readable and writable by this user"
        if path.exists() and not os.access(path, os.R_OK | os.W_OK)
        else None
    )


def _folders(state: StateDir) -> Iterator[tuple[Path, int]]:
    for path in (state.flight, state.incidents, state.costs.parent):
        yield path, stat.S_IFDIR


def _within(state: StateDir) -> Iterator[tuple[Path, int]]:
    for path in (state.log, state.gate_inputs, state.costs, state.db, state.host_facts):
        yield path, stat.S_IFREG
    for path in (state.socket, state.control):
        yield path, stat.S_IFSOCK
    if state.flight.is_dir():
        for path in sorted(state.flight.iterdir()):
            if _RANKS_OWN.fullmatch(path.name):
                yield path, stat.S_IFREG
