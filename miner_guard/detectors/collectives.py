"""Finds the rank that is late to a collective from each rank's torch Flight Recorder. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Late:
    """The ranks that have not entered the collective in which the others wait."""

    ranks: tuple[int, ...]
    detail: str


def late(traces: Mapping[int, Sequence[Mapping[str, Any]]]) -> Late | None:
    """The ranks whose last collective has a lower sequence number than the others', in the group
    with the gap.

    `traces` maps a rank to its entries with `collective_seq_id`, `process_group` and
    `profiling_name`, oldest first. None where all ranks are level, or where fewer than two ranks
    have entries.
    """
    last: dict[tuple[str, str], dict[int, tuple[int, str]]] = {}
    for rank, entries in traces.items():
        for entry in entries:
            if entry.get("is_p2p") or entry.get("collective_seq_id") is None:
                continue
            name = str(entry.get("profiling_name"))
            # `nccl:…` and `gloo:…` count separately within one group.
            group = (str(entry.get("process_group")), name.partition(":")[0])
            last.setdefault(group, {})[rank] = (int(entry["collective_seq_id"]), name)
    for numbers in last.values():
        most = max(number for number, _ in numbers.values())
        behind = tuple(sorted(rank for rank, (number, _) in numbers.items() if number < most))
        if behind and len(numbers) > 1:
            return Late(behind, _detail(numbers, behind, most))
    return None


def _detail(numbers: Mapping[int, tuple[int, str]], behind: tuple[int, ...], most: int) -> str:
    name = next(name for number, name in numbers.values() if number == most)
    late_ones = ", ".join(f"rank {rank} is at number {numbers[rank][0]}" for rank in behind)
    waiting = [str(rank) for rank in sorted(numbers) if rank not in behind]
    wait = f"rank {waiting[0]} waits" if len(waiting) == 1 else f"ranks {','.join(waiting)} wait"
    return f"{late_ones}, {wait} in collective number {most} ({name})"
