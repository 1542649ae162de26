"""Keeps notes in the state directory on what helped last time, by label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miner_guard import state_dir
from miner_guard.system.clock import Clock, iso_utc

_FILE = "explain-notes.json"
_MAX_COUNT = 20
"""Maximum number of notes per label; the oldest are dropped first."""


@dataclass(frozen=True)
class Note:
    """A person's note on a label."""

    when: str
    text: str


def read(state: state_dir.StateDir) -> Mapping[str, Sequence[Note]]:
    """All notes, newest first. A damaged file counts as empty; `add` moves it aside."""
    document = state_dir.read_json(_path(state))
    labels = document.get("notes") if isinstance(document, dict) else None
    if not isinstance(labels, dict):
        return {}
    return {
        label: [
            Note(str(e.get("when", "")), str(e.get("text", "")))
            for e in entries
            if isinstance(e, dict)
        ]
        for label, entries in labels.items()
        if isinstance(entries, list)
    }


def add(state: state_dir.StateDir, label: str, text: str, clock: Clock) -> None:
    """Save a note on what helped with `label`. Raises OSError if the state directory is not
    writable."""
    path = _path(state)
    if path.exists() and not isinstance(state_dir.read_json(path), dict):
        state_dir.set_aside(path)
    notes = {name: list(entries) for name, entries in read(state).items()}
    notes[label] = [Note(iso_utc(clock.wall()), text), *notes.get(label, [])][:_MAX_COUNT]
    document = {
        name: [{"when": n.when, "text": n.text} for n in entries] for name, entries in notes.items()
    }
    state_dir.write_json(path, {"notes": document})


def _path(state: state_dir.StateDir) -> Path:
    return state.root / _FILE
