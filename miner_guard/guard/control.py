"""Executes the commands that operators send through control.sock, and assembles the status."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miner_guard.guard.states import State
from miner_guard.guard.supervisor import Supervisor
from miner_guard.record.status_document import LastExit, RankProcess, RunStatus
from miner_guard.record.store import CLEAR_NOW, RUN_SECTION, now_row
from miner_guard.record.words import counted
from miner_guard.state_dir import finite
from miner_guard.system.clock import Clock, iso_utc


def answer(
    run: Supervisor,
    request: Mapping[str, Any],
    document: Callable[[], Mapping[str, Any]],
    reload: Callable[[], None],
) -> Mapping[str, Any]:
    """Execute a request from control.sock; the answer has `done` with the action taken, or `error`
    with the reason for a refusal. `document` returns the current status; `reload` replaces this
    process."""
    what = request.get("do")
    if what == "status":
        return {"status": document()}
    if what == "checkpoint":
        ranks = counted(run.flights.ask_checkpoint(), "rank")
        return {"done": f"asked {ranks} for a checkpoint"}
    if what == "saved":
        return {"done": run.flights.has_saved()}
    if what == "restart":
        state = run.relaunch_between_epochs("miner-guard ctl restart")
        waits = f" when it is no longer in the state {state}; ask again to restart it at once"
        return {"done": f"restarting the miner{waits if state else ''}"}
    orders: Mapping[Any, tuple[Callable[[], None], str]] = {
        "pause": (run.pause, "restarts are off until `miner-guard ctl resume`"),
        "resume": (run.resume, "restarts are on"),
        "reload": (reload, "replacing the guard by the installed version; the miner keeps running"),
    }
    if what not in orders:
        known = ", ".join(("status", "checkpoint", "restart", *orders))
        return {"error": f"unknown request {what!r}; known: {known}"}
    act, done = orders[what]
    act()
    return {"done": done}


_QUIET_S = 5.0
"""Maximum age of the state while the monitors receive nothing new. The ages and samples in it
change all the time, but composing it costs more than everything else an idle guard does."""

_LIVE = (State.RUNNING, State.STOPPING, State.ENDING)


def run_status(run: Supervisor, start_command: str | None) -> RunStatus:
    """The supervisor's fields of the state."""
    launch, last = run.launch, run.last_exit
    age = (
        run.clock.monotonic() - launch.started
        if launch is not None and run.state in _LIVE
        else None
    )
    ended = None
    if last is not None:
        runtime_s = round(last.runtime_s, 3)
        ended = LastExit(last.code, last.signal, last.asked, last.finished, runtime_s)
    return RunStatus(
        state=run.state.value,
        paused=run.paused,
        run_id=run.spec.run_id,
        keeper_pid=run.keeper.hello.keeper_pid,
        guard_pid=os.getpid(),
        pid=launch.pid if launch is not None else None,
        command=list(run.spec.command),
        host=socket.gethostname(),
        state_dir=str(run.spec.state.root),
        start_command=start_command,
        attempt=max(run.launches - 1, 0),
        restarts=max(run.launches - 1, 0) + run.in_place.count,
        started=None if age is None else iso_utc(run.clock.wall() - age),
        last_exit=ended,
        exit_code=run.exit_code,
        reason=run.reason or None,
        rank_processes={
            str(rank): RankProcess(identity.pid, identity.local_rank)
            for rank, identity in run.flights.identities().items()
        },
    )


class Status:
    """Keeps the latest document and writes it. `latest` may be read from any thread."""

    def __init__(self, clock: Clock, write_row: Callable[[str, Sequence[Any]], None]) -> None:
        self._clock = clock
        self._write_row = write_row
        self._written: Any = None
        self._sections: dict[str, Any] | None = None
        self._heard: object = None
        self._due_at = float("-inf")
        self.latest: Mapping[str, Any] = {}

    def due(self, heard: object) -> bool:
        """Return True if a new document is due: `heard` has changed since the last call that
        returned True, or that call was at least `_QUIET_S` ago."""
        now = self._clock.monotonic()
        if heard == self._heard and now < self._due_at:
            return False
        self._heard, self._due_at = heard, now + _QUIET_S
        return True

    def update(self, document: Mapping[str, Any]) -> None:
        """Store a new document; write its changed sections if it differs from the last one."""
        plain = finite(document)
        self.latest = {**plain, "updated": iso_utc(self._clock.wall())}
        if plain == self._written:
            return
        self._written = plain
        if self._sections is None:
            self._sections = {}
            self._write_row(*CLEAR_NOW)
        sections: dict[str, Any] = {RUN_SECTION: {}}
        for name, value in self.latest.items():
            # Once a section, always one: its row must not outlive its value.
            if isinstance(value, Mapping) or name in self._sections:
                sections[name] = value
            else:
                sections[RUN_SECTION][name] = value
        for name, section in sections.items():
            if name not in self._sections or self._sections[name] != section:
                self._sections[name] = section
                self._write_row(*now_row(name, section))
