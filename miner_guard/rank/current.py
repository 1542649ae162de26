"""This process's guard: one per rank, created by `init`."""

from __future__ import annotations

import os
from pathlib import Path

from miner_guard.rank import environment
from miner_guard.rank.guard import Guard

_current: Guard | None = None


def current() -> Guard | None:
    """This process's guard; None if `init` was not called or the guard is closed."""
    return None if _current is None or _current._closed else _current


def init(state_dir: str | Path | None = None, *, agree: bool = True) -> Guard:
    """Create this rank's guard. Call it once on every rank, after init_process_group, because the
    ranks register with each other here. Never raises.

    `state_dir` is for a miner that runs without a supervisor; under `miner-guard run` the ranks get
    it from the environment. With `agree=False`, the ranks set up their agreement only when the
    first collective question needs it. A second call returns the same guard.
    """
    global _current
    if _current is not None and not _current._closed:
        return _current
    try:
        guard = Guard(environment.find(state_dir=state_dir))
    except Exception as error:  # noqa: BLE001 - training must start even without a record; reported below
        guard = Guard(
            environment.RankContext(
                0, 0, 1, f"alone-{os.getpid()}", None, environment.RankSettings()
            )
        )
        guard._degraded("init", error)
    guard._begin(agree)
    guard._attempt("mark", environment.mark, guard.place)
    _current = guard
    return guard
