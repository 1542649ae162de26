"""Nodes: reports when other nodes of the run stop responding, and when they respond again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.monitors import reachability
from miner_guard.monitors.base import Context, Launch, Monitor

_MISSES = 2
"""Consecutive failed probes before a node is reported: one lost packet does not count as an
outage."""


@dataclass
class _Node:
    """One other node. It counts as unreachable only if it has answered before."""

    port: int
    seen: bool = False
    misses: int = 0
    since: float = 0.0
    reason: str = ""

    @property
    def down(self) -> bool:
        return self.seen and self.misses >= _MISSES


class NodesMonitor(Monitor):
    """Probes on a schedule in a job thread; inactive if the command runs on one node."""

    name = "nodes"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._meeting: tuple[str, int] | None = None
        self._nodes: dict[str, _Node] = {}
        self._scheduled = False

    def on_launch(self, launch: Launch) -> Iterable[Finding]:
        self._meeting = reachability.rendezvous(launch.command)
        if self._meeting is not None and not self._scheduled:
            self._scheduled = True
            settings = self.context.config.health
            self.context.jobs.every(
                "nodes", settings.node_check_every_s, self._look, first_after_s=1.0
            )
        return ()

    def _look(self) -> None:
        if self._meeting is None:
            return
        host, port = self._meeting
        if reachability.is_own(host):
            for peer in reachability.peers(port):
                self._nodes.setdefault(peer, _Node(port))
        else:
            self._nodes.setdefault(host, _Node(port))
        for name, node in list(self._nodes.items()):
            self._ask(name, node)

    def _ask(self, name: str, node: _Node) -> None:
        asked = self.context.clock.monotonic()
        reason = reachability.answers(name, node.port, self.context.config.health.node_timeout_s)
        was_down = node.down
        if reason is None:
            if was_down:
                self.context.emit(
                    make_finding(
                        "network_recovered", node=name, seconds=round(asked - node.since, 1)
                    )
                )
            node.seen, node.misses, node.reason = True, 0, ""
            return
        if node.misses == 0:
            node.since = asked
        node.misses += 1
        node.reason = reason
        if node.down and not was_down:
            detail = (
                f"no response for {self.context.clock.monotonic() - node.since:.0f}s ({reason}); "
                "check its network"
            )
            self.context.emit(make_finding("network_unreachable", node=name, detail=detail))

    def snapshot(self) -> Mapping[str, Any]:
        return {
            name: {"reachable": not node.down if node.seen else None, "reason": node.reason or None}
            for name, node in list(self._nodes.items())
        }
