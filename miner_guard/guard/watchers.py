"""A run's watchers, in the order they are called."""

from __future__ import annotations

from collections.abc import Callable

from miner_guard.record.events import Event, degraded
from miner_guard.show.alerts import AlertsMonitor
from miner_guard.show.monitors import MetricsMonitor, OtelMonitor
from miner_guard.watch.base import Context, Monitor
from miner_guard.watch.chain import ChainMonitor
from miner_guard.watch.checkpoints import ReportsMonitor
from miner_guard.watch.costs import CostsMonitor
from miner_guard.watch.curves import CurvesMonitor
from miner_guard.watch.gpu import DiagnosisMonitor, GpuMonitor
from miner_guard.watch.hang import HangMonitor
from miner_guard.watch.host import HostMonitor
from miner_guard.watch.nodes import NodesMonitor
from miner_guard.watch.output import (
    DegradedHooksMonitor,
    FirstStepMonitor,
    IncidentsMonitor,
    LogAttachMonitor,
    SecretLeaksMonitor,
)
from miner_guard.watch.ranks import RankEndsMonitor, RanksMonitor
from miner_guard.watch.state import StateMonitor
from miner_guard.watch.steps import StepsMonitor
from miner_guard.watch.uploads import AuditMonitor, UploadsMonitor

MONITORS: tuple[type[Monitor], ...] = (
    LogAttachMonitor,
    FirstStepMonitor,
    ReportsMonitor,
    StepsMonitor,
    CurvesMonitor,
    RanksMonitor,
    RankEndsMonitor,
    IncidentsMonitor,
    DiagnosisMonitor,
    ChainMonitor,
    DegradedHooksMonitor,
    UploadsMonitor,
    AuditMonitor,
    HostMonitor,
    GpuMonitor,
    HangMonitor,
    NodesMonitor,
    CostsMonitor,
    SecretLeaksMonitor,
    MetricsMonitor,
    OtelMonitor,
    StateMonitor,
    AlertsMonitor,
)


def load_monitors(context: Context, report: Callable[[Event], None]) -> list[Monitor]:
    """Create all watchers; one that can't be created is reported and skipped."""
    monitors: list[Monitor] = []
    for kind in MONITORS:
        try:
            monitors.append(kind(context))
        except Exception as error:  # noqa: BLE001 - a bug in a watcher must not stop the miner; it is reported
            what = (
                f"cannot start monitor {kind.name}: {type(error).__name__}: {error}; "
                "the others keep running"
            )
            report(degraded(what))
    return monitors
