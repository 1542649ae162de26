"""The supervisor that a distributed-training miner runs under.

Every rank imports this package, so it imports neither torch nor any third-party module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "GateDecision": "miner_guard.uploads.decision",
    "Guard": "miner_guard.rank.guard",
    "MonitoringCostTracker": "miner_guard.costs.tracker",
    "get_global_tracker": "miner_guard.costs.global_tracker",
    "init": "miner_guard.rank.current",
}

__all__ = [
    "GateDecision",
    "Guard",
    "MonitoringCostTracker",
    "__version__",
    "get_global_tracker",
    "init",
]

if TYPE_CHECKING:
    from miner_guard.costs.global_tracker import get_global_tracker
    from miner_guard.costs.tracker import MonitoringCostTracker
    from miner_guard.rank.current import init
    from miner_guard.rank.guard import Guard
    from miner_guard.uploads.decision import GateDecision


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'miner_guard' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
