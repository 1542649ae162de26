"""The cost tracker under the module name that the monitoring costs guide (source 000) imports.

`miner_guard` exports the same two names.
"""

from __future__ import annotations

from miner_guard.costs import MonitoringCostTracker, get_global_tracker

__all__ = ["MonitoringCostTracker", "get_global_tracker"]
