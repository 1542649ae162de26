"""Holds this process's cost tracker. Inside a rank, the tracker records to the guard's ledger."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from miner_guard import state_dir
from miner_guard.costs.presets import Budget
from miner_guard.costs.tracker import MonitoringCostTracker
from miner_guard.eventlog.catalog import Finding

_global: MonitoringCostTracker | None = None
_global_mutex = threading.Lock()


def set_global_tracker(tracker: MonitoringCostTracker | None) -> None:
    """Make `tracker` this process's global tracker; None removes it."""
    global _global
    with _global_mutex:
        _global = tracker


def get_global_tracker(env: Mapping[str, str] | None = None) -> MonitoringCostTracker:
    """Return this process's tracker. Inside a rank, it records to the guard's ledger. Until this
    process records an operation, the tracker's report shows that ledger."""
    global _global
    with _global_mutex:
        if _global is None:
            environment = os.environ if env is None else env
            ledger = _ledger_of(environment)
            _global = _of_this_rank(ledger) or MonitoringCostTracker(ledger=ledger)
        return _global


def _ledger_of(env: Mapping[str, str]) -> Path | None:
    try:
        return state_dir.choose("miner", env.get(state_dir.STATE_DIR), env).costs
    except RuntimeError:
        # With neither a state directory nor a home directory, costs stay local to this process.
        return None


def _of_this_rank(ledger: Path | None) -> MonitoringCostTracker | None:
    # Do not import the hook here: reading costs must not create one in a process without it.
    hook = sys.modules.get("miner_guard.rank.guard")
    guard = None if hook is None else hook.current()
    if guard is None:
        return None

    def report(finding: Finding) -> None:
        # The supervisor judges the budget from the recorded costs: reporting it here too would
        # duplicate the finding.
        if finding.event in ("monitoring_throttled", "monitoring_relaxed"):
            guard.emit(finding)

    def on_record(operation: str, seconds: float, blocking: bool) -> None:
        guard.add_cost(operation, seconds, blocking=blocking)

    budget = Budget.from_settings(guard.place.settings.costs)
    return MonitoringCostTracker(budget=budget, ledger=ledger, report=report, on_record=on_record)
