"""Which parts run beside the miner, in the order in which they are called."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

from miner_guard.events import Finding, found
from miner_guard.supervisor import parts as parts_package
from miner_guard.supervisor.parts import Context, Part

PARTS = (
    "log_only", "reports", "steps", "curves", "ranks", "incidents", "diagnosis", "chain", "push_lines", "uploads",
    "health", "gpu", "hang", "nodes", "costs", "exposed", "metrics", "alerts",
)  # fmt: skip
"""Modules of `miner_guard.supervisor.parts`; each defines exactly one `Part`."""


def compose(context: Context, report: Callable[[Finding], None]) -> list[Part]:
    """Make all parts; one that can't be made is reported and left out."""
    parts: list[Part] = []
    for name in PARTS:
        module = f"{parts_package.__name__}.{name}"
        try:
            parts.append(_part_of(importlib.import_module(module))(context))
        except Exception as error:  # noqa: BLE001 - a part's defect must not stop the miner; it is reported
            what = f"part {name} could not be made: {type(error).__name__}: {error}; the rest goes on"
            report(found("guard_degraded", what=what))
    return parts


def _part_of(module: ModuleType) -> type[Part]:
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Part) and value.__module__ == module.__name__
    ]
    if len(own) != 1:
        raise TypeError(f"{module.__name__} must define one Part, it defines {len(own)}")
    return own[0]
