"""Helpers that the hook tests use to create a rank and read its record."""

from __future__ import annotations

from typing import Any

from miner_guard.rank.environment import RankContext, find
from miner_guard.rank.flight import FlightReader
from miner_guard.state_dir import StateDir


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def place(state: StateDir | None, *, rank: int = 0, world_size: int = 1, **env: str) -> RankContext:
    return find(
        {"RANK": str(rank), "WORLD_SIZE": str(world_size), **env}, state.root if state else None
    )


def reader_of(state: StateDir, rank: int = 0) -> FlightReader:
    return FlightReader(state.flight_of(rank), acknowledge=True)


def entries(state: StateDir, kind: str) -> list[dict[str, Any]]:
    return [e for _, e in reader_of(state).entries() if e["kind"] == kind]


def messages(state: StateDir) -> list[str]:
    return [e["fields"]["what"] for e in entries(state, "event") if e["event"] == "guard_degraded"]


def state_of(state: StateDir) -> str:
    now = reader_of(state).now()
    assert now is not None
    return now.state
