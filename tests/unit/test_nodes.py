"""Other nodes, found through the launcher's own command and connections."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from miner_guard.watch import ranks as reachability

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100000A:72D8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1
   1: 0100000A:72D8 0200000A:9C40 01 00000000:00000000 00:00000000 00000000     0        0 2
   2: 0100000A:72D8 0100000A:9C41 01 00000000:00000000 00:00000000 00000000     0        0 3
   3: 0100000A:1F90 0300000A:9C42 01 00000000:00000000 00:00000000 00000000     0        0 4
"""


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
    assert reachability.rendezvous(command.split()) == where


def test_peers_are_the_other_hosts_on_that_port(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    table.write_text(TABLE)
    assert reachability.peers(0x72D8, [table, tmp_path / "absent"]) == {"10.0.0.2"}


def test_a_refused_connection_is_an_answer_and_silence_is_not() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert reachability.answers("127.0.0.1", port, 2.0) is None
    # A name that never resolves (RFC 6761); the test with two nodes covers an unresponsive network.
    assert reachability.answers("no-such-node.invalid", 9, 0.2) is not None


def test_own_addresses_are_known() -> None:
    assert reachability.is_own("127.0.0.1")
    assert not reachability.is_own("192.0.2.1")
