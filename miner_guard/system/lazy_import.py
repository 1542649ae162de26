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
    """Make `import name` raise ImportError inside the `with` block. Does nothing if the module has
    already been imported."""
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
    """Make `import name` return a stand-in inside the `with` block. The stand-in imports the module
    when the program first uses one of its attributes.

    `given` are attributes that need no import. Does nothing if the module is already imported.
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
    """Hide all entry points inside the `with` block. A library that collects its plugins when it is
    imported would otherwise read the metadata of every installed distribution."""
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
