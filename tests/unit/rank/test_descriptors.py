"""The descriptors that the guard holds open in a rank."""

from __future__ import annotations

import gc
import os
from collections import Counter

from miner_guard.rank.guard import Guard
from miner_guard.state_dir import StateDir
from tests.support.ranks import Ranks
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
