"""Reports that the previous guard was killed, even if it left no process behind."""

from __future__ import annotations

from collections.abc import Iterator

from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.guard.states import State
from miner_guard.record.store import RunReader
from miner_guard.state_dir import StateDir, read_json
from miner_guard.system.boot import boot_id


def killed_guard(state: StateDir) -> Iterator[Finding]:
    """Yield a finding if the last guard to use this state directory did not shut down cleanly.

    Call this while holding the lock: by then the last guard is gone, so its status is `done` unless
    something killed that guard or its last write failed."""
    status = RunReader(state.db).now()
    if status.get("state") in (None, State.DONE.value):
        return
    run = read_json(state.pid_registry)
    boot = run.get("boot") if isinstance(run, dict) else None
    restarted = bool(boot) and boot != boot_id()
    why = "the host restarted" if restarted else "killed by SIGKILL or the OOM killer"
    seen = status.get("updated")
    yield make_finding("guard_killed", pid=status.get("pid"), seen=seen, why=why)
