"""Shows output to a monitor through the line router, as the supervisor does."""

from __future__ import annotations

from miner_guard.record.events import Event
from miner_guard.watch.base import Monitor
from miner_guard.watch.line_router import LineRouter


def show(monitor: Monitor, *chunks: bytes) -> list[Event]:
    """The monitor's events about these chunks, the last of which ends the output."""
    router = LineRouter([monitor])
    deliveries = [delivery for chunk in chunks for delivery in router.pieces(chunk)]
    return [
        event
        for delivery in (*deliveries, *router.end())
        for event in getattr(monitor, delivery.method)(delivery.argument)
    ]
