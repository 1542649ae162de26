"""A run's watchers: every class of `watch/` and `show/` that derives from `Monitor`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator

from miner_guard import watch
from miner_guard.record.events import Event, degraded
from miner_guard.watch.base import Context, Monitor

_SHOWING = ("miner_guard.show.alerts", "miner_guard.show.monitors")
"""The other modules of `show/` draw, and need not be in the guard's memory."""


def kinds() -> list[type[Monitor]]:
    """The classes of all watchers, in the order of their calls."""
    modules = [m.name for m in pkgutil.iter_modules(watch.__path__, f"{watch.__name__}.")]
    for name in (*modules, *_SHOWING):
        importlib.import_module(name)
    ours = {kind for kind in _below(Monitor) if kind.__module__.startswith("miner_guard.")}
    return sorted(ours, key=lambda kind: (kind.order, kind.__module__, kind.__name__))


def _below(kind: type[Monitor]) -> Iterator[type[Monitor]]:
    """The classes with a name of their own that derive from `kind`."""
    for derived in kind.__subclasses__():
        if "name" in vars(derived):
            yield derived
        yield from _below(derived)


def load_monitors(context: Context, report: Callable[[Event], None]) -> list[Monitor]:
    """Create all watchers; one that can't be created is reported and skipped."""
    monitors: list[Monitor] = []
    for kind in kinds():
        try:
            monitors.append(kind(context))
        except Exception as error:  # noqa: BLE001 - a bug in a watcher must not stop the miner; it is reported
            what = (
                f"cannot start monitor {kind.name}: {type(error).__name__}: {error}; "
                "the others keep running"
            )
            report(degraded(what))
    return monitors
