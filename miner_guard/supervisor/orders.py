"""What the supervisor is told: the order it works on, and the wishes that end a launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from miner_guard.config import Config
from miner_guard.statedir import StateDir


@dataclass(frozen=True)
class Order:
    """What is to be supervised."""

    command: Sequence[str]
    environment: Callable[[int], Mapping[str, str]]
    """The miner's environment for launch number n."""

    config: Config
    state: StateDir
    run_id: str
    finished_code: int = 0
    """What the guard exits with when the miner has finished."""


@dataclass(frozen=True)
class Wish:
    """Why the current launch is being ended by the guard."""

    cause: str
    then: str
    """`stop`, `restart` (by the policy) or `relaunch` (a person asked: at once, not counted)."""

    exit_code: int = 0
