"""Empty modules in place of a validator's imports that no verdict depends on."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import types
from collections.abc import Sequence
from typing import Any


class _Anything(type):
    """A class that has every attribute and can be called, indexed and inherited from, as can its
    instances."""

    def __getattr__(cls, name: str) -> Any:
        return _anything(name)

    def __getitem__(cls, item: Any) -> Any:
        return cls


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    permissive = {
        "__init__": lambda *_, **__: None,
        "__getattr__": lambda _, attribute: _anything(attribute)(),
        "__call__": lambda *_, **__: _anything(name)(),
    }
    return _Anything(name, (), permissive)


class _StandIn(types.ModuleType):
    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith(("Error", "Exception")):
            # Validators catch these.
            return type(name, (Exception,), {})
        return _anything(name)


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Provides an empty module for each of these names, and for all names below it."""

    def __init__(self, only: tuple[str, ...]) -> None:
        self._only = only

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """The module if its name is one of this finder's."""
        if not any(name == of or name.startswith(of + ".") for of in self._only):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        """An empty module that has every attribute."""
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Runs nothing."""
