"""Executes commands for the running guard. Operators send them through control.sock, monitors
through `SupervisorControl`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miner_guard.guard.flights import Flights
from miner_guard.guard.states import StopRequest, Then
from miner_guard.guard.supervisor import Supervisor
from miner_guard.record.words import counted


class CommandHandler:
    """The monitors' `SupervisorControl`. Any thread may call its methods, except `answer`, which is
    for the supervisor's thread only."""

    def __init__(
        self,
        supervisor: Supervisor,
        flights: Flights,
        soon: Callable[[Callable[[], None]], None],
        document: Callable[[], Mapping[str, Any]],
    ) -> None:
        """`soon` runs a call on the supervisor's thread; `document` returns the current status."""
        self._supervisor, self._flights, self._soon, self._document = (
            supervisor,
            flights,
            soon,
            document,
        )

    def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Execute a request from control.sock; the answer has `done` with the action taken, or
        `error` with the reason for a refusal."""
        what = request.get("do")
        if what == "status":
            return {"status": self._document()}
        if what == "checkpoint":
            asked = counted(self._flights.ask_checkpoint(), "rank")
            return {"done": f"asked {asked} for a checkpoint"}
        if what == "restart":
            self.relaunch("miner-guard ctl restart")
            return {"done": "restarting the miner"}
        if what == "pause":
            self._supervisor.pause()
            return {"done": "restarts are off until `miner-guard ctl resume`"}
        if what == "resume":
            self._supervisor.resume()
            return {"done": "restarts are on"}
        return {
            "error": f"unknown request {what!r}; known: status, checkpoint, restart, pause, resume"
        }

    def restart(self, cause: str) -> None:
        """Stop the miner and restart it under the restart policy."""
        self._supervisor.request_stop(StopRequest(cause, Then.RESTART))

    def finish(self, cause: str) -> None:
        """Stop the remaining processes of a miner whose ranks have finished, then exit with the
        guard's code for a finished miner."""
        self._supervisor.request_stop(StopRequest(cause, Then.FINISH))

    def relaunch(self, cause: str) -> None:
        """Stop the miner and restart it immediately, without counting a failure."""
        self._supervisor.request_stop(StopRequest(cause, Then.RELAUNCH))

    def stop(self, cause: str, exit_code: int) -> None:
        """Stop the miner and end the guard."""
        self._supervisor.request_stop(StopRequest(cause, Then.STOP, exit_code))

    def use_command(self, command: Sequence[str]) -> None:
        """Use this command from the next launch on."""
        self._soon(lambda: self._supervisor.use_command(command))
