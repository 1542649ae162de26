"""Tracks what monitoring costs against a budget (source 000). Standard library only, because ranks
use it too."""

from __future__ import annotations

from miner_guard.costs.estimate import estimate
from miner_guard.costs.global_tracker import get_global_tracker, set_global_tracker
from miner_guard.costs.presets import PRESETS, Budget
from miner_guard.costs.tracker import MonitoringCostTracker

__all__ = [
    "PRESETS",
    "Budget",
    "MonitoringCostTracker",
    "estimate",
    "get_global_tracker",
    "set_global_tracker",
]
