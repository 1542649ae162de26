"""What to run, the requests that end a launch, and the states of a run.

    STARTING ─▶ RUNNING ─▶ STOPPING (the guard asked) ─▶ ENDING (what is left) ─▶ WAITING ─▶ RUNNING
                   └──────── (the miner ended by itself) ───▲                     PAUSED

`DONE` can be reached from every state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from miner_guard.config import Config
from miner_guard.state_dir import StateDir


class State(Enum):
    """States of a run; the values appear in the present state."""

    STARTING = "starting"
    """Before the first launch, while the preflight is running."""

    RUNNING = "running"
    STOPPING = "stopping"
    """The guard has asked the launcher to exit."""

    ENDING = "ending"
    """The launcher has exited; its remaining processes and output are being handled."""

    WAITING = "waiting"
    """Waiting for the next launch: backoff, then GPU memory."""

    PAUSED = "paused"
    DONE = "done"


@dataclass(frozen=True)
class LaunchSpec:
    """The miner to supervise and its settings."""

    command: Sequence[str]
    environment: Callable[[int], Mapping[str, str]]
    """Returns the miner's environment for a launch number, counting from 0."""

    config: Config
    state: StateDir
    run_id: str
    finished_code: int = 0
    """The guard's exit code after the miner has finished."""


class Then(Enum):
    """The next action after a request has ended a launch."""

    STOP = "stop"
    """The guard exits."""

    RESTART = "restart"
    """Restart when the restart policy allows it."""

    FINISH = "finish"
    """The guard exits as if the miner had finished: the ranks reported that they were done, but
    they hang on exit."""

    RELAUNCH = "relaunch"
    """Restart immediately. An operator or a setting requested it, so it does not count as a
    failure."""


@dataclass(frozen=True)
class StopRequest:
    """A request to end the current launch, with its reason and what follows."""

    cause: str
    then: Then
    exit_code: int = 0
    """The guard's exit code if `then` is `STOP`."""
