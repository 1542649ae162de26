"""Event the rank that is late to a collective."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from miner_guard.rank import dumps
from miner_guard.watch.evidence import late


def trace(
    *numbers: int, group: str = "default", name: str = "gloo:all_reduce"
) -> list[dict[str, Any]]:
    return [
        {"collective_seq_id": n, "process_group": group, "profiling_name": name, "is_p2p": False}
        for n in numbers
    ]


def test_the_rank_with_the_smaller_number_is_late() -> None:
    found = late({0: trace(40, 41, 42), 1: trace(40, 41), 2: trace(41, 42)})
    assert found is not None
    assert found.ranks == (1,)
    assert (
        found.detail
        == "rank 1 is at collective 41, ranks 0,2 wait in collective 42 (gloo:all_reduce)"
    )


def test_each_group_counts_for_itself() -> None:
    assert (
        late(
            {
                0: trace(9, group="a") + trace(1, group="b"),
                1: trace(9, group="a") + trace(1, group="b"),
            }
        )
        is None
    )
    found = late(
        {0: trace(9, group="a") + trace(2, group="b"), 1: trace(9, group="a") + trace(1, group="b")}
    )
    assert found is not None
    assert found.ranks == (1,)
    assert found.detail.endswith("rank 0 waits in collective 2 (gloo:all_reduce)")


def test_the_backends_of_one_group_count_for_themselves() -> None:
    nccl, gloo = "nccl:all_reduce", "gloo:all_reduce"
    traces = {rank: trace(900, name=nccl) + trace(7, name=gloo) for rank in (0, 1)} | {
        2: trace(899, name=nccl) + trace(7, name=gloo)
    }
    found = late(traces)
    assert found is not None
    assert (
        found.detail
        == "rank 2 is at collective 899, ranks 0,1 wait in collective 900 (nccl:all_reduce)"
    )


def test_collectives_of_nccl_are_in_the_answer_beside_those_of_gloo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU build of torch has only the other recorder, which would show only the guard's own group
    in a hang on GPUs."""

    def dump(*entries: dict[str, Any]) -> Callable[[], bytes]:
        return lambda: json.dumps({"entries": entries}).encode()

    nccl, gloo = trace(900, name="nccl:all_reduce"), trace(7)
    fake = SimpleNamespace(_dump_nccl_trace_json=dump(*nccl), _dump_fr_trace_json=dump(*gloo))
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", fake)
    document = dumps._last_collectives()
    assert [e["profiling_name"] for e in document["entries"]] == [
        "nccl:all_reduce",
        "gloo:all_reduce",
    ]  # type: ignore[attr-defined]
    del fake._dump_nccl_trace_json, fake._dump_fr_trace_json
    with pytest.raises(LookupError, match="has none of"):
        dumps._last_collectives()


def test_level_ranks_and_single_ones_name_no_culprit() -> None:
    assert late({0: trace(5), 1: trace(5)}) is None
    assert late({0: trace(5)}) is None
    assert late({0: [], 1: [{"collective_seq_id": None}]}) is None


def test_at_the_same_number_the_gpu_that_has_not_started_it_is_late() -> None:
    """A spinning kernel must not hide behind collectives that its CPU has already enqueued."""

    def at(state: str) -> list[dict[str, Any]]:
        return [{**trace(7, name="nccl:all_reduce")[0], "state": state}]

    found = late({0: at("started"), 1: at("scheduled"), 2: at("started")})
    assert found is not None
    assert found.ranks == (1,)
    assert found.detail == (
        "ranks 0,2 wait in collective 7 (nccl:all_reduce); on rank 1, the GPU has not started it"
    )
    # Without TORCH_NCCL_ENABLE_TIMING torch records no start times, so the late rank is unknown.
    assert late({0: at("scheduled"), 1: at("scheduled")}) is None
    assert late({0: at("completed"), 1: at("scheduled")}) is None
