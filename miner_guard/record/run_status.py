"""The supervisor's fields of the present state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from miner_guard.record.section import Section


@dataclass(frozen=True)
class LastExit(Section):
    """How the previous launch ended."""

    code: int | None = None
    """The exit code as reported by a shell: 128 + n if signal n ended the launcher."""

    signal: int | None = None
    asked: bool | None = None
    """Whether the guard requested the exit."""

    finished: bool | None = None
    runtime_s: float | None = None


@dataclass(frozen=True)
class RankProcess(Section):
    """One rank's process."""

    pid: int | None = None
    local_rank: int | None = None


@dataclass(frozen=True)
class RunStatus(Section):
    """The supervisor's fields, which are at the top level of the document."""

    state: str | None = None
    """A value of `supervisor.states.State`."""

    paused: bool | None = None
    run_id: str | None = None
    keeper_pid: int | None = None
    """The process that owns the miner and that a service manager started; stop this one."""

    guard_pid: int | None = None
    pid: int | None = None
    """The miner's launcher; None if it is not running."""

    command: Sequence[str] = ()
    host: str | None = None
    state_dir: str | None = None
    start_command: str | None = None
    """A command that starts this guard again: a pm2 or systemctl command if one of them runs the
    guard, otherwise the guard's command line."""

    attempt: int | None = None
    """Number of launches in this run after the first."""

    restarts: int | None = None
    """Number of failures since the miner was last healthy."""

    started: str | None = None
    """When the launch began, UTC in ISO 8601; None if no launch is running."""

    last_exit: LastExit | None = None
    exit_code: int | None = None
    """The guard's exit code, once the run is over."""

    reason: str | None = None
    """Why the run is over."""

    rank_processes: Mapping[str, RankProcess] = field(default_factory=dict)
    output_dropped_bytes: int | None = None
