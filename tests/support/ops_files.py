"""Reads the files in ops/ for tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.support import requires

OPS = requires.REPO / "ops"


def yaml_of(name: str) -> dict[str, Any]:
    """A YAML file in ops/."""
    requires.module("yaml")
    import yaml

    document: dict[str, Any] = yaml.safe_load((OPS / name).read_text(encoding="utf-8"))
    return document


def lost(ours: Any, theirs: Any, place: str = "") -> Iterator[str]:
    """The places of `ours` that a program's own types, read and written again, have dropped or
    changed: programs ignore keys that are misspelt or in the wrong place."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from lost(value, theirs.get(key), f"{place}/{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, value in enumerate(ours):
            yield from lost(value, theirs[number], f"{place}[{number}]")
    elif ours != theirs:
        yield place
