"""The descriptors that the guard holds open in a rank, and the requests that come through them."""

from __future__ import annotations

import gc
import json
import os
from collections import Counter

from miner_guard.rank import dumps
from miner_guard.rank.guard import Guard
from miner_guard.state_dir import StateDir
from tests.support.ranks import Ranks
from tests.support.waiting import until
from tests.unit.rank.helpers import place


def held() -> Counter[str]:
    """How many of this process's descriptors refer to a memory, a socket, …"""
    # Garbage of other tests may still hold files open.
    gc.collect()
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    # The descriptor of the listing is gone.
    return Counter(os.readlink(link).partition(":")[0] for link in links if os.path.lexists(link))


def test_a_supervised_rank_holds_its_record_and_one_socket(state: StateDir, ranks: Ranks) -> None:
    before = held()
    guard = Guard(place(state, ranks))
    guard.step(loss=1.0)
    assert held() - before == {"/memfd": 2, "socket": 1}, "Python's mapping duplicates its own"
    guard.close(finished=True)


def test_a_rank_reports_its_collectives_through_its_connection(
    state: StateDir, ranks: Ranks
) -> None:
    guard = Guard(place(state, ranks))
    assert guard._recorder.wire is not None
    dump = state.collectives_of(0)
    dump.parent.mkdir()
    dumps.serve(guard._recorder.wire, dump)
    assert ranks.connected == [0]
    ranks.callers[0].connection.send(b"?")
    until(dump.exists, 30, "the dump")
    assert json.loads(dump.read_text()).keys() <= {"entries", "error"}
