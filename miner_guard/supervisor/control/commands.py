"""What the running guard can be asked: by people through control.sock, by its own parts through
`Control`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miner_guard.supervisor.flights import Flights
from miner_guard.supervisor.launch_spec import StopRequest, Then
from miner_guard.supervisor.supervisor import Supervisor


class CommandHandler:
    """The parts' `Control`, safe from any thread; `answer` is for the supervisor's."""

    def __init__(
        self,
        supervisor: Supervisor,
        flights: Flights,
        soon: Callable[[Callable[[], None]], None],
        document: Callable[[], Mapping[str, Any]],
    ) -> None:
        """`soon` runs a call in the supervisor's thread; `document` gives the status as of now."""
        self._supervisor, self._flights, self._soon, self._document = (
            supervisor,
            flights,
            soon,
            document,
        )

    def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Do what a line on control.sock asks for; `done` says what was done, `error` why nothing
        was."""
        what = request.get("do")
        if what == "status":
            return {"status": self._document()}
        if what == "checkpoint":
            return {"done": f"asked {self._flights.ask_checkpoint()} ranks for a checkpoint"}
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
        """Stop the miner and start it again by the restart policy."""
        self._supervisor.want(StopRequest(cause, Then.RESTART))

    def finish(self, cause: str) -> None:
        """Stop what is left of a miner whose ranks have finished, and end the guard as after any
        finish."""
        self._supervisor.want(StopRequest(cause, Then.FINISH))

    def relaunch(self, cause: str) -> None:
        """Stop the miner and start it again at once, not counted as a failure."""
        self._supervisor.want(StopRequest(cause, Then.RELAUNCH))

    def stop(self, cause: str, exit_code: int) -> None:
        """Stop the miner and end the guard."""
        self._supervisor.want(StopRequest(cause, Then.STOP, exit_code))

    def use_command(self, command: Sequence[str]) -> None:
        """The miner's command from the next launch on."""
        self._soon(lambda: self._supervisor.use_command(command))
