"""On-disk record of a publisher's progress, so that its successor can finish or undo the upload."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from miner_guard.state_dir import make_folder, open_private, read_regular
from miner_guard.uploads.repos.base import Notes, StagedObject

STAGING = "staging"
COMMITTING = "committing"
"""Point of no return: the repo holds everything, and only making it visible remains."""


class PublishInProgress(Exception):
    """Another publisher holds the journal's lock."""


class Journal:
    """One publisher's notes, replaced atomically and synced on each change. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mutex = threading.Lock()
        self._document: dict[str, Any] = {}

    def read(self) -> Mapping[str, Any] | None:
        """An earlier publisher's notes; None if the journal is missing or unreadable."""
        try:
            document = json.loads(read_regular(self.path))
        except (OSError, ValueError):
            return None
        if not isinstance(document, dict) or document.get("phase") not in (STAGING, COMMITTING):
            return None
        return document

    def begin(self, tag: str, notes: Mapping[str, Any]) -> None:
        """Start a publication; `notes` come from an earlier attempt at the same revision, if
        any."""
        self._set(phase=STAGING, tag=tag, tickets=[], notes=dict(notes))

    def committing(self, tickets: list[StagedObject]) -> None:
        """Record that everything is staged. Synced before the first object becomes visible."""
        self._set(phase=COMMITTING, tickets=[asdict(t) for t in tickets])

    def end(self) -> None:
        """Record that nothing is left to finish or undo."""
        self.path.unlink(missing_ok=True)

    def notes_of(self, key: str) -> Notes:
        """A dictionary whose changes are on disk when the assignment returns."""
        with self._mutex:
            kept: dict[str, Any] = self._document["notes"].setdefault(key, {})
        return _Kept(self, kept)

    def _set(self, **changes: Any) -> None:
        with self._mutex:
            self._document.update(changes)
            self._write()

    def sync(self) -> None:
        """Write the current notes to disk."""
        with self._mutex:
            self._write()

    def _write(self) -> None:
        make_folder(self.path.parent)
        draft = self.path.with_suffix(".tmp")
        with open(open_private(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
            json.dump(self._document, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self.path)


class _Kept(dict[str, Any]):
    """The notes for one key."""

    def __init__(self, journal: Journal, own: dict[str, Any]) -> None:
        super().__init__(own)
        self._journal = journal
        self._own = own

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._own[key] = value
        self._journal.sync()


def tickets_of(document: Mapping[str, Any]) -> list[StagedObject]:
    """The staged objects listed in a journal."""
    return [StagedObject(**t) for t in document.get("tickets", [])]


def journal_path(folder: Path, label: str) -> Path:
    """One journal per repo, shared by all processes that publish to it."""
    return folder / f"publish-{hashlib.sha256(label.encode()).hexdigest()[:16]}.json"


@contextlib.contextmanager
def exclusively(path: Path) -> Iterator[int]:
    """Hold the journal's lock, for this process and for children that inherit the descriptor.
    Raises PublishInProgress."""
    make_folder(path.parent)
    fd = open_private(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PublishInProgress(
                "Previous upload still in progress, skipping new upload"
            ) from error
        yield fd
    finally:
        # Close without unlocking: a recovery process that still has work inherited the descriptor
        # and keeps other publishers out.
        os.close(fd)
