"""Finds the other nodes of a run from the launcher's command and connections, and checks whether
they respond.

This module does not speak the protocol of torch's launcher. A node counts as reachable if its
kernel responds, whether it accepts or refuses the connection.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from miner_guard.system.launcher_args import number_of, value_of

_ESTABLISHED = "01"
_DEFAULT_PORT = 29500
"""torchrun's default (`torch.distributed.run`, static rendezvous); the c10d rendezvous uses
29400."""

_RENDEZVOUS_PORT = 29400


def rendezvous(command: Sequence[str]) -> tuple[str, int] | None:
    """Host and port of this command's rendezvous; None if it runs on one node."""
    if value_of(command, "--nnodes") in (None, "1", "1:1"):
        return None
    endpoint = value_of(command, "--rdzv-endpoint")
    if endpoint:
        host, _, port = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", "")
        return host.strip("[]"), int(port) if port.isdigit() else _RENDEZVOUS_PORT
    host = value_of(command, "--master-addr") or ""
    port_given = number_of(command, "--master-port")
    return (host, _DEFAULT_PORT if port_given is None else port_given) if host else None


def peers(
    port: int, tables: Iterable[Path] = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
) -> set[str]:
    """Addresses of other hosts connected to this host's `port`."""
    found: set[str] = set()
    for table in tables:
        try:
            rows = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            _, local, remote, state = row.split()[:4]
            (_, own_port), (address, _) = _parsed(local), _parsed(remote)
            if (
                state == _ESTABLISHED
                and own_port == port
                and not address.is_loopback
                and address != _parsed(local)[0]
            ):
                found.add(str(address))
    return found


def _parsed(text: str) -> tuple[IPv4Address | IPv6Address, int]:
    """Parse an address in the kernel's format, such as `0100007F:1F90`: words of four bytes in host
    order (proc(5))."""
    digits, _, port = text.partition(":")
    words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
    address = ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address, int(port, 16)


def answers(host: str, port: int, timeout_s: float) -> str | None:
    """Try to connect: None if the node's kernel responds, else why it did not."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except ConnectionRefusedError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None


def is_own(host: str) -> bool:
    """Return True if `host` is this host, that is, if this host can bind the address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
