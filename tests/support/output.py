"""Shows output to a monitor through the line router, as the supervisor does."""

from __future__ import annotations

from miner_guard.eventlog.catalog import Finding
from miner_guard.watch.base import Monitor
from miner_guard.watch.line_router import LineRouter


def show(monitor: Monitor, *chunks: bytes) -> list[Finding]:
    """The monitor's findings about these chunks, the last of which ends the output."""
    router = LineRouter([monitor])
    deliveries = [delivery for chunk in chunks for delivery in router.pieces(chunk)]
    return [
        finding
        for delivery in (*deliveries, *router.end())
        for finding in getattr(monitor, delivery.method)(delivery.argument)
    ]
