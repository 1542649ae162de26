"""Finds the rank that is late to a collective by comparing the ranks' torch Flight Recorders.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miner_guard.record.words import rank_list


@dataclass(frozen=True)
class Late:
    """The ranks that have not entered the collective that the others are waiting in."""

    ranks: tuple[int, ...]
    detail: str


def late(traces: Mapping[int, Sequence[Mapping[str, Any]]]) -> Late | None:
    """Return the ranks that are behind: those whose last collective in a process group has a lower
    sequence number than the others'. If the numbers are equal, return the ranks whose GPU has not
    started the collective that other GPUs have started.

    `traces` maps a rank to its entries with `collective_seq_id`, `process_group`, `profiling_name`
    and `state`, oldest first. The sequence number counts what the CPU has enqueued, so it stays
    equal even when one GPU is stuck in a kernel; torch records what a GPU has started only with
    TORCH_NCCL_ENABLE_TIMING=1. None if no rank is behind, or if fewer than two ranks have entries.
    """
    last: dict[tuple[str, str], dict[int, _Last]] = {}
    for rank, entries in traces.items():
        for entry in entries:
            if entry.get("is_p2p") or entry.get("collective_seq_id") is None:
                continue
            name = str(entry.get("profiling_name"))
            # `nccl:…` and `gloo:…` count separately within one group.
            group = (str(entry.get("process_group")), name.partition(":")[0])
            state = str(entry.get("state"))
            number = int(entry["collective_seq_id"])
            last.setdefault(group, {})[rank] = _Last(number, name, state)
    for ranks in last.values():
        furthest = max(ranks.values(), key=lambda each: each.number)
        behind = tuple(sorted(r for r, each in ranks.items() if each.number < furthest.number))
        if behind:
            late_ones = ", ".join(f"rank {r} is at collective {ranks[r].number}" for r in behind)
            return Late(behind, f"{late_ones}, {_waiting(ranks, behind, furthest)}")
    for ranks in last.values():
        furthest = next(iter(ranks.values()))
        behind = tuple(sorted(r for r, each in ranks.items() if each.state == "scheduled"))
        if behind and any(each.state == "started" for each in ranks.values()):
            whose = f"on {rank_list(behind)}, the GPU has not started it"
            return Late(behind, f"{_waiting(ranks, behind, furthest)}; {whose}")
    return None


@dataclass(frozen=True)
class _Last:
    """A rank's last collective in one group."""

    number: int
    name: str
    state: str
    """`scheduled`, `started` or `completed`, according to the GPU's events."""


def _waiting(ranks: Mapping[int, _Last], behind: tuple[int, ...], furthest: _Last) -> str:
    waiting = [str(rank) for rank in sorted(ranks) if rank not in behind]
    wait = f"rank {waiting[0]} waits" if len(waiting) == 1 else f"ranks {','.join(waiting)} wait"
    return f"{wait} in collective {furthest.number} ({furthest.name})"
