"""A run's monitors, in the order they are called."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.monitors.base import Context, Monitor

MONITORS = (
    "log_attach",
    "first_step",
    "reports",
    "steps",
    "curves",
    "ranks",
    "rank_ends",
    "incidents",
    "diagnosis",
    "chain",
    "degraded_hooks",
    "printed_uploads",
    "swarm",
    "uploads",
    "audit",
    "health",
    "gpu",
    "hang",
    "nodes",
    "costs",
    "secret_leaks",
    "metrics",
    "otel",
    "verdict",
    "alerts",
)
"""Modules of `miner_guard.monitors`; each defines exactly one `Monitor`."""


def load_monitors(context: Context, report: Callable[[Finding], None]) -> list[Monitor]:
    """Create all monitors; one that can't be created is reported and skipped."""
    monitors: list[Monitor] = []
    for name in MONITORS:
        module = f"miner_guard.monitors.{name}"
        try:
            monitors.append(_monitor_of(importlib.import_module(module))(context))
        except Exception as error:  # noqa: BLE001 - a bug in a monitor must not stop the miner; it is reported
            what = (
                f"cannot start monitor {name}: {type(error).__name__}: {error}; "
                "the others keep running"
            )
            report(make_finding("guard_degraded", what=what))
    return monitors


def _monitor_of(module: ModuleType) -> type[Monitor]:
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Monitor)
        and value.__module__ == module.__name__
    ]
    if len(own) != 1:
        raise TypeError(f"{module.__name__} must define exactly one Monitor; found {len(own)}")
    return own[0]
