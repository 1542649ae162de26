"""What to run, the requests that end a launch, the states of a run, and the only transitions
between them.

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


class RunEvent(Enum):
    """Events that move a run from one state to the next."""

    LAUNCHED = "the miner was started"
    LAUNCH_FAILED = "the miner could not be started"
    STOP_BEGUN = "the guard asked the launcher to exit"
    LAUNCHER_GONE = "the launcher exited, or survived even SIGKILL"
    RETRY_PLANNED = "another launch is planned"
    HELD = "restarts are paused until `ctl resume`"
    FINISHED = "the run is over"


_MOVES: dict[tuple[State, RunEvent], State] = {
    (State.STARTING, RunEvent.LAUNCHED): State.RUNNING,
    (State.WAITING, RunEvent.LAUNCHED): State.RUNNING,
    (State.PAUSED, RunEvent.LAUNCHED): State.RUNNING,
    (State.STARTING, RunEvent.LAUNCH_FAILED): State.ENDING,
    (State.WAITING, RunEvent.LAUNCH_FAILED): State.ENDING,
    (State.PAUSED, RunEvent.LAUNCH_FAILED): State.ENDING,
    (State.RUNNING, RunEvent.STOP_BEGUN): State.STOPPING,
    (State.RUNNING, RunEvent.LAUNCHER_GONE): State.ENDING,
    (State.STOPPING, RunEvent.LAUNCHER_GONE): State.ENDING,
    (State.ENDING, RunEvent.RETRY_PLANNED): State.WAITING,
    (State.ENDING, RunEvent.HELD): State.PAUSED,
    (State.WAITING, RunEvent.HELD): State.PAUSED,
}
TRANSITIONS = _MOVES | {
    (state, RunEvent.FINISHED): State.DONE for state in State if state is not State.DONE
}


class IllegalTransition(Exception):
    """An event that is invalid in the current state: a bug in the guard, never in the miner."""


def after(state: State, event: RunEvent) -> State:
    """Return the state that `event` leads to. Raises IllegalTransition if `state` does not allow
    it."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"{event.name} while {state.name}") from None


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
