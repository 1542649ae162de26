"""What the guard hears from its keeper."""

from __future__ import annotations

import json
import socket

from miner_guard.guard.keeper_client import KeeperClient
from miner_guard.guard.loop import Loop
from miner_guard.system.clock import FakeClock


def test_output_that_waited_arrives_as_one_piece_and_in_order_with_the_messages() -> None:
    """Its lines share their time of arrival: the steps of a fast miner once took no time."""
    keeper, link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper.send(json.dumps({"hello": {"keeper_pid": 1}}).encode())
    client, heard = KeeperClient(link), list[object]()
    client.on_output = heard.append
    client.on_stop = heard.append
    for packet in (b"\0one\n", b"\0two\n", json.dumps({"stop": "TERM"}).encode(), b"\0three\n"):
        keeper.send(packet)
    loop = Loop(FakeClock(), on_error=heard.append)
    client.watch(loop)
    loop.turn()
    assert heard == [b"one\ntwo\n", "TERM", b"three\n"]
    loop.close()
    keeper.close()
    link.close()
