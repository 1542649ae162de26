"""Who is late to a collective."""

from __future__ import annotations

from typing import Any

from miner_guard.detectors.collectives import late


def trace(*numbers: int, group: str = "default", name: str = "gloo:all_reduce") -> list[dict[str, Any]]:
    return [{"collective_seq_id": n, "process_group": group, "profiling_name": name, "is_p2p": False} for n in numbers]


def test_the_rank_with_the_smaller_number_is_late() -> None:
    found = late({0: trace(40, 41, 42), 1: trace(40, 41), 2: trace(41, 42)})
    assert found is not None
    assert found.ranks == (1,)
    assert found.detail == "rank 1 is at number 41, ranks 0,2 wait in collective number 42 (gloo:all_reduce)"


def test_each_group_counts_for_itself() -> None:
    assert late({0: trace(9, group="a") + trace(1, group="b"), 1: trace(9, group="a") + trace(1, group="b")}) is None
    found = late({0: trace(9, group="a") + trace(2, group="b"), 1: trace(9, group="a") + trace(1, group="b")})
    assert found is not None
    assert found.ranks == (1,)
    assert found.detail.endswith("rank 0 waits in collective number 2 (gloo:all_reduce)")


def test_level_ranks_and_single_ones_name_nobody() -> None:
    assert late({0: trace(5), 1: trace(5)}) is None
    assert late({0: trace(5)}) is None
    assert late({0: [], 1: [{"collective_seq_id": None}]}) is None
