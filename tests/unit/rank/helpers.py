"""Helpers that the hook tests use to create a rank."""

from __future__ import annotations

from miner_guard.rank.environment import RankContext, find
from miner_guard.state_dir import StateDir
from tests.support.ranks import Ranks


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def place(
    state: StateDir | None,
    ranks: Ranks | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    **env: str,
) -> RankContext:
    """A rank's place; without `ranks` no guard listens."""
    wire = {} if ranks is None else ranks.env
    own = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    return find({**own, **wire, **env}, state.root if state else None)
