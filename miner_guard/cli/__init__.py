"""The commands: functions with `@command` in the modules of this package.

`main` imports all of these modules, so import what is slow inside the function: `logs` and `status`
start in 0.15 s because only the command that runs pays for its imports.
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


_commands: dict[str, Command] = {}


def command(group: str, *examples: str) -> Callable[[_Function], _Function]:
    """Make a function the command of its name, in one of `GROUPS`, with examples for its help."""

    def register(function: _Function) -> _Function:
        _commands[function.__name__] = Command(function, group, examples)
        return function

    return register


def load() -> Mapping[str, Command]:
    """Import every module of this package; returns the commands by name, in order of groups."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        if module.name != f"{__name__}.main":
            importlib.import_module(module.name)
    return dict(sorted(_commands.items(), key=lambda item: GROUPS.index(item[1].group)))
