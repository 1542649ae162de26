"""The commands: functions with `@command` in the modules of this package.

`main` imports all modules with commands, so import what is slow inside the function: `logs` and
`status` start in 0.15 s because only the command that runs pays for its imports.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

GROUPS = ("Run", "See", "Understand", "Publish")

_Function = TypeVar("_Function", bound=Callable[..., None])


@dataclass(frozen=True)
class Command:
    """A function whose docstring is the help and whose annotated parameters are the options."""

    function: Callable[..., None]
    group: str
    examples: tuple[str, ...]


_HELPERS = frozenset({"main", "options", "output", "screen", "fleet"})
"""Modules without commands. Two of them are slow to import."""

_commands: dict[str, Command] = {}


def command(group: str, *examples: str) -> Callable[[_Function], _Function]:
    """Make a function the command of its name, in one of `GROUPS`, with examples for its help."""

    def register(function: _Function) -> _Function:
        _commands[function.__name__] = Command(function, group, examples)
        return function

    return register


def load() -> Mapping[str, Command]:
    """Import every module with commands; returns the commands by name, in order of groups."""
    for module in pkgutil.iter_modules(__path__):
        if module.name not in _HELPERS:
            importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_commands.items(), key=lambda item: GROUPS.index(item[1].group)))
