"""The guard's present state in run.db, as tests read and write it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miner_guard.record.status_document import OLD_S
from miner_guard.record.store import CLEAR_NOW, RUN_SECTION, Row, RunReader, RunStore, now_row
from miner_guard.state_dir import StateDir


def status_of(root: Path) -> dict[str, Any]:
    """The state in a state directory; empty if no guard has written one."""
    return RunReader(StateDir(Path(root)).db).now()


def now_rows(document: Mapping[str, Any]) -> list[Row]:
    """The rows of a whole present state (`RunReader.now`)."""
    sections = {name: value for name, value in document.items() if isinstance(value, Mapping)}
    run = {name: value for name, value in document.items() if name not in sections}
    return [now_row(name, value) for name, value in {RUN_SECTION: run, **sections}.items()]


_locks: dict[Path, int] = {}


def write_status(root: Path, document: Mapping[str, Any], *, age_s: float = 0.0) -> None:
    """Write a state as if the guard had written it `age_s` ago. A young one is a running guard's,
    whose keeper holds the lock."""
    state = StateDir(Path(root))
    store = RunStore(state.db)
    written: Row = ("UPDATE now SET written = ?", (time.time() - age_s,))
    store.write(CLEAR_NOW, *now_rows(document), written)
    store.close()
    if age_s < OLD_S and state.root not in _locks:
        _locks[state.root] = os.open(state.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(_locks[state.root], fcntl.LOCK_EX)
    elif age_s >= OLD_S and state.root in _locks:
        os.close(_locks.pop(state.root))
