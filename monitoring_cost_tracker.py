"""The cost tracker under the module name that the monitoring costs guide (source 000) imports.

`miner_guard` exports the same two names.
"""

from __future__ import annotations

from miner_guard.costs.global_tracker import get_global_tracker
from miner_guard.costs.tracker import MonitoringCostTracker

__all__ = ["MonitoringCostTracker", "get_global_tracker"]
