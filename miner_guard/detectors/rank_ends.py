"""Finds ranks that ended before the others, and describes how, from their last records. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from miner_guard.rank.layout import Now
from miner_guard.record.words import rank_list

_WELL = ("ended", "closed", "finished")
"""States of a rank that reached the end of its program, with or without reporting that it
finished."""


@dataclass(frozen=True)
class Left:
    """Ranks that ended while others were still running."""

    ranks: tuple[int, ...]
    detail: str


def left_behind(ranks: Mapping[int, Now], gone: Collection[int]) -> Left | None:
    """The ranks that ended while the launch is still running: those in `gone` no longer have a
    process, the rest do. None if no rank is missing."""
    staying = [rank for rank in ranks if rank not in gone]
    lost = tuple(sorted(rank for rank in gone if rank in ranks))
    if not lost or not staying:
        return None
    return Left(lost, _words(ranks, lost, staying))


def ended_early(ranks: Mapping[int, Now]) -> Left | None:
    """After the launch, the ranks that ended without an error before the others failed; None if
    there is no such rank.

    A rank that raised first is itself the cause. A rank that the launcher killed records no end
    time.
    """
    failures = [now.heartbeat for now in ranks.values() if now.state == "failed"]
    before = min(failures, default=float("inf"))
    early = tuple(
        sorted(r for r, now in ranks.items() if now.state in _WELL and now.heartbeat < before)
    )
    staying = [rank for rank, now in ranks.items() if now.state not in _WELL]
    if not early or not staying:
        return None
    return Left(early, _words(ranks, early, staying))


def _words(ranks: Mapping[int, Now], lost: Collection[int], staying: Collection[int]) -> str:
    how = ", ".join(f"rank {rank} {_how(ranks[rank])}" for rank in sorted(lost))
    return f"{how}, before {rank_list(staying)}"


def _how(now: Now) -> str:
    step = now.inner_step if now.inner_step is not None else now.total_steps
    at = f"at step {step}" if now.total_steps else "before its first step"
    return {
        "ended": f"ended with code 0 {at}",
        "closed": f"closed its guard and ended {at}",
        "finished": f"finished {at}",
        "failed": f"ended with an exception {at}",
    }.get(now.state, f"died {at} (killed, or ended by os._exit)")
