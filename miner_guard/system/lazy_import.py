"""Blocks or defers another library's imports, so that the guard starts sooner and uses less
memory."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from types import ModuleType
from typing import Any


@contextmanager
def block_import(name: str) -> Iterator[None]:
    """Within it, `import name` raises ImportError; a module already imported stays unaffected."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


@contextmanager
def defer_import(name: str, **given: Any) -> Iterator[None]:
    """Within it, `import name` yields a stand-in that imports the module when one of its attributes
    is first used.

    `given` are attributes that need no import. A module already imported stays unaffected.
    """
    if name in sys.modules:
        yield
        return
    stand_in = ModuleType(name)
    vars(stand_in).update(given, __getattr__=lambda attribute: _attribute(stand_in, attribute))
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        _remove(stand_in)


@contextmanager
def without_plugins() -> Iterator[None]:
    """Within it, no installed distribution has entry points: a library that collects its plugins
    when it is imported reads the metadata of every distribution for it."""
    original = metadata.entry_points
    metadata.entry_points = lambda **_: ()  # type: ignore[assignment]
    try:
        yield
    finally:
        metadata.entry_points = original


def _attribute(stand_in: ModuleType, attribute: str) -> Any:
    if attribute.startswith("__"):
        # The import system asks for `__path__`.
        raise AttributeError(attribute)
    _remove(stand_in)
    return getattr(importlib.import_module(stand_in.__name__), attribute)


def _remove(stand_in: ModuleType) -> None:
    if sys.modules.get(stand_in.__name__) is stand_in:
        del sys.modules[stand_in.__name__]
