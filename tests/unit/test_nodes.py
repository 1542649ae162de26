"""Other nodes, found through the launcher's own command and connections."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from miner_guard.watch import nodes


@pytest.mark.parametrize(
    ("command", "where"),
    [
        (
            "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=10.0.0.1:29444 train.py",
            ("10.0.0.1", 29444),
        ),
        ("torchrun --nnodes 1:4 --rdzv_endpoint node-a train.py", ("node-a", 29400)),
        (
            "torchrun --nnodes=2 --master_addr 10.0.0.1 --master_port 29511 train.py",
            ("10.0.0.1", 29511),
        ),
        ("torchrun --nnodes=2 --rdzv-endpoint=[fd00::1]:29444 train.py", ("fd00::1", 29444)),
        ("torchrun --standalone --nproc-per-node=4 train.py", None),
        ("torchrun --nnodes=1 --rdzv-endpoint=10.0.0.1:29444 train.py", None),
        ("python train.py", None),
    ],
)
def test_the_rendezvous_address_is_read_from_the_command(
    command: str, where: tuple[str, int] | None
) -> None:
    assert nodes.rendezvous(command.split()) == where


def test_peers_are_the_other_hosts_on_that_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def connection(port: int, peer: str | None, status: str = "ESTABLISHED") -> Any:
        other = SimpleNamespace(ip=peer, port=40000) if peer else ()
        return SimpleNamespace(
            laddr=SimpleNamespace(ip="10.0.0.1", port=port), raddr=other, status=status
        )

    rows = [
        connection(29400, None, "LISTEN"),
        connection(29400, "10.0.0.2"),
        connection(29400, "::ffff:10.0.0.5"),
        connection(29400, "10.0.0.1"),
        connection(29400, "127.0.0.1"),
        connection(29400, "10.0.0.4", "TIME_WAIT"),
        connection(8080, "10.0.0.3"),
    ]
    monkeypatch.setattr(psutil, "net_connections", lambda _kind: rows)
    assert nodes.peers(29400) == {"10.0.0.2", "10.0.0.5"}


def test_a_refused_connection_is_an_answer_and_silence_is_not() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert nodes.answers("127.0.0.1", port, 2.0) is None
    # A name that never resolves (RFC 6761); the test with two nodes covers an unresponsive network.
    assert nodes.answers("no-such-node.invalid", 9, 0.2) is not None


def test_own_addresses_are_known() -> None:
    assert nodes.is_this_host("127.0.0.1")
    assert not nodes.is_this_host("192.0.2.1")
