"""Other nodes: found through the launcher's command and connections, and probed."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

import psutil

from miner_guard.checks.request import number_of, value_of
from miner_guard.record.events import event
from miner_guard.watch.base import Context, Events, Launch, Monitor

_STATIC_PORT, _RENDEZVOUS_PORT = 29500, 29400
"""torchrun's defaults (`torch.distributed.run`): static rendezvous, and c10d."""


def rendezvous(command: Sequence[str]) -> tuple[str, int] | None:
    """Host and port of this command's rendezvous; None if it runs on one node."""
    if value_of(command, "--nnodes") in (None, "1", "1:1"):
        return None
    endpoint = value_of(command, "--rdzv-endpoint")
    if endpoint:
        host, _, port = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", "")
        return host.strip("[]"), int(port) if port.isdigit() else _RENDEZVOUS_PORT
    host = value_of(command, "--master-addr") or ""
    port_number = number_of(command, "--master-port")
    return (host, _STATIC_PORT if port_number is None else port_number) if host else None


def peers(port: int) -> set[str]:
    """Addresses of other hosts connected to this host's `port`. Raises psutil.Error and OSError."""
    addresses = set()
    for row in psutil.net_connections("tcp"):
        if row.laddr and row.raddr and row.laddr.port == port:
            here, there = _address(row.laddr.ip), _address(row.raddr.ip)
            other = there != here and not there.is_loopback
            if row.status == psutil.CONN_ESTABLISHED and other:
                addresses.add(str(there))
    return addresses


def _address(text: str) -> IPv4Address | IPv6Address:
    address = ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address


def answers(host: str, port: int, timeout_s: float) -> str | None:
    """Try to connect: None if the node's kernel responds, else why it did not."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except ConnectionRefusedError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None


def is_this_host(host: str) -> bool:
    """Return True if `host` is this host, that is, if this host can bind the address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


_NODE_EVERY_S, _NODE_TIMEOUT_S = 5.0, 3.0
_MISSES = 2
"""Consecutive failed probes before a node is reported: one lost packet is no outage."""


@dataclass
class _Node:
    misses: int | None = None
    """Consecutive failed probes; None until it has answered once, which it must to be lost."""

    since: float = 0.0
    """When it last answered."""

    reason: str | None = None

    @property
    def down(self) -> bool:
        return self.misses is not None and self.misses >= _MISSES


class NodesMonitor(Monitor):
    """Probes on a schedule in a job thread; inactive if the command runs on one node."""

    name = "nodes"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._meeting: tuple[str, int] | None = None
        self._nodes: dict[str, _Node] = {}
        self._scheduled = False

    def on_launch(self, launch: Launch) -> Events:
        self._meeting = rendezvous(launch.command)
        if self._meeting is not None and not self._scheduled:
            self._scheduled = True
            self.context.jobs.every("nodes", _NODE_EVERY_S, self._look, first_after_s=1.0)
        return ()

    def _look(self) -> None:
        if self._meeting is None:
            return
        host, port = self._meeting
        for name in peers(port) if is_this_host(host) else {host}:
            self._nodes.setdefault(name, _Node())
        for name, node in list(self._nodes.items()):
            was_down, node.reason = node.down, answers(name, port, _NODE_TIMEOUT_S)
            now = self.context.clock.monotonic()
            silent_s = round(now - node.since, 1)
            if node.reason is None:
                node.misses, node.since = 0, now
            elif node.misses is not None:
                node.misses += 1
            if node.down == was_down:
                continue
            text = f"NODE REACHABLE: {name} again after {silent_s:.0f}s"
            if node.down:
                text = f"NODE UNREACHABLE: {name}: no response for {silent_s:.0f}s ({node.reason})"
                text += "; check its network"
            self.context.emit(
                event(
                    "network_unreachable",
                    "critical" if node.down else "info",
                    text,
                    node=name,
                    seconds=silent_s,
                    detail=node.reason,
                )
            )

    def snapshot(self) -> Mapping[str, Any]:
        return {
            name: {
                "reachable": None if node.misses is None else not node.down,
                "reason": node.reason,
            }
            for name, node in list(self._nodes.items())
        }
