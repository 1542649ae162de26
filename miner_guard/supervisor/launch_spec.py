"""What the supervisor works on, and the requests that end a launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from miner_guard.config import Config
from miner_guard.state_dir import StateDir


@dataclass(frozen=True)
class LaunchSpec:
    """What is to be supervised."""

    command: Sequence[str]
    environment: Callable[[int], Mapping[str, str]]
    """The miner's environment for launch number n."""

    config: Config
    state: StateDir
    run_id: str
    finished_code: int = 0
    """What the guard exits with when the miner has finished."""


class Then(Enum):
    """What follows the launch that a request ends."""

    STOP = "stop"
    """Nothing: the guard ends."""

    RESTART = "restart"
    """The next launch, when the restart policy allows it."""

    FINISH = "finish"
    """Nothing, as after a miner that finished by itself: its ranks said so, and only their exit
    hangs."""

    RELAUNCH = "relaunch"
    """The next launch at once; not counted as a failure, since a person or a setting asked for
    it."""


@dataclass(frozen=True)
class StopRequest:
    """Why the guard ends the current launch, and what follows."""

    cause: str
    then: Then
    exit_code: int = 0
    """Of the guard, where `then` is `STOP`."""
