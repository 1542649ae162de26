"""Wraps up a launch whose processes are all gone: delivers its last output and records, judges
whether the miner finished, and reports how it ended."""

from __future__ import annotations

from miner_guard.guard.attribution import how_it_ended, ran_to_its_end
from miner_guard.guard.flights import Flights
from miner_guard.guard.launch import ActiveLaunch
from miner_guard.guard.loop import Loop
from miner_guard.guard.relay import Relay
from miner_guard.guard.states import LaunchSpec, StopRequest
from miner_guard.guard.teardown import Teardown
from miner_guard.record.events import degraded, event
from miner_guard.watch.base import Exit
from miner_guard.watch.runner import MonitorRunner


class Conclusion:
    """Wraps up launches. Supervisor thread only. A failed step is reported and does not affect the
    others."""

    def __init__(
        self, spec: LaunchSpec, loop: Loop, *, runner: MonitorRunner, relay: Relay, flights: Flights
    ) -> None:
        self._spec, self._loop = spec, loop
        self._runner, self._relay, self._flights = runner, relay, flights

    def of(self, launch: ActiveLaunch) -> Exit:
        """Wrap up `launch` and return how it ended."""
        for work in (
            self._show_last_words,
            lambda: self._flights.last_poll(self._runner),
            lambda: self._report_teardown(launch.teardown),
        ):
            self._loop.attempt(work)
        end = launch.exit(self._has_finished(launch))
        self._loop.attempt(lambda: self._report_exit(end, launch.stop_request))
        return end

    def _show_last_words(self) -> None:
        left_out = self._relay.show_rest()
        if left_out:
            what = (
                f"{left_out} bytes of the miner's last output were passed on unchecked: "
                "the monitors had fallen behind"
            )
            self._runner.finding(degraded(what))

    def _has_finished(self, launch: ActiveLaunch) -> bool:
        """Return True if the miner finished its work; False if that check fails."""
        answers: list[bool] = []
        self._loop.attempt(lambda: answers.append(self._judge_finish(launch)))
        return answers == [True]

    def _judge_finish(self, launch: ActiveLaunch) -> bool:
        miner = self._spec.config.miner
        if miner.finite or self._flights.all_in({"finished"}):
            return True
        if miner.finite is not None or miner.attach != "auto" or launch.stop_request is not None:
            return False
        self._runner.end_output()
        return ran_to_its_end(self._flights, self._runner.objections())

    def _report_teardown(self, teardown: Teardown | None) -> None:
        if teardown is not None:
            for finding in teardown.report(self._spec.run_id):
                self._runner.finding(finding)

    def _report_exit(self, end: Exit, stop_request: StopRequest | None) -> None:
        runtime = round(end.runtime_s, 3)
        if end.finished:
            self._runner.finding(
                event(
                    "miner_finished",
                    "info",
                    f"MINER FINISHED: {how_it_ended(end)} after {runtime:.0f}s",
                    how=how_it_ended(end),
                    code=end.code,
                    runtime_s=runtime,
                )
            )
            return
        asked = (
            "without being asked" if stop_request is None else f"as requested: {stop_request.cause}"
        )
        how = f"{how_it_ended(end)} {asked}"
        if end.code == 0 and not end.asked:
            how += (
                "; if the miner has finished its work, report that with "
                "guard.close(finished=True) or --finite ([miner] finite = true)"
            )
        finding = event(
            "miner_exited",
            "error",
            f"MINER EXITED: {how}",
            how=how,
            code=end.code,
            runtime_s=runtime,
        )
        self._runner.finding(finding.at("info") if end.asked else finding)
