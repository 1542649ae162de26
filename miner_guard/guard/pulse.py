"""The supervisor's tick: it polls the flight records, calls the monitors, and checks the launch's
health, dropped output and processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from miner_guard.guard.child import Child
from miner_guard.guard.flights import Flights
from miner_guard.guard.launch import ActiveLaunch
from miner_guard.guard.loop import Loop
from miner_guard.guard.process_tree import ProcessTree
from miner_guard.guard.relay import Relay
from miner_guard.guard.restart import RestartPolicy
from miner_guard.guard.states import LaunchSpec, State
from miner_guard.rank.layout import Now
from miner_guard.record.events import degraded, event
from miner_guard.system.clock import Clock
from miner_guard.system.once import Once
from miner_guard.watch.runner import MonitorRunner

DROPS_EVERY_S = 60.0
TICK_S = 0.5
"""Interval between ticks. On average, it delays hang detection by half its length."""

_QUIET_S = 1.0
"""Interval while no rank has a flight record and the miner prints nothing."""


class PulsedRun(Protocol):
    """The parts of the supervisor that the tick uses."""

    spec: LaunchSpec
    clock: Clock
    loop: Loop
    runner: MonitorRunner
    relay: Relay
    flights: Flights
    process_tree: ProcessTree
    policy: RestartPolicy
    state: State
    launch: ActiveLaunch | None
    exit_code: int | None

    @property
    def child(self) -> Child | None:
        """The current launch's launcher."""
        ...


class Pulse:
    """Runs the tick twice a second, or once a second while nothing is happening. If a step of the
    tick fails, the others still run."""

    def __init__(self, supervisor: PulsedRun) -> None:
        self._run = supervisor
        self._blind = Once()
        self._reported_bytes = 0
        self._reported_at = 0.0
        self._quiet = False
        self._deliveries = -1

    def interval_s(self) -> float:
        """Seconds until the next tick."""
        return _QUIET_S if self._quiet else TICK_S

    def tick(self) -> None:
        """Run all steps in one tick."""
        run, attempt = self._run, self._run.loop.attempt
        if run.exit_code is not None:
            # The monitors have stopped; only their last messages still have to be sent.
            return
        now = run.clock.monotonic()
        self._quiet = not run.flights.identities() and run.runner.deliveries == self._deliveries
        self._deliveries = run.runner.deliveries
        attempt(lambda: run.flights.poll(run.runner))
        ranks: dict[int, Now] = {}
        attempt(lambda: ranks.update(run.flights.now()))
        attempt(lambda: run.runner.tick(now, ranks))
        attempt(lambda: self._watch_health(ranks))
        attempt(self._watch_drops)
        attempt(self._watch_processes)

    def _watch_processes(self) -> None:
        child = self._run.child
        try:
            self._run.process_tree.refresh(None if child is None else child.process)
        except OSError as error:
            self.report_blind(error)

    def report_blind(self, error: OSError) -> None:
        """Report, once per run, that the miner's processes can't be inspected."""
        if self._blind.first():
            what = f"cannot inspect the miner's processes ({error.strerror}); retrying"
            self._run.runner.finding(degraded(what))

    def _watch_health(self, ranks: Mapping[int, Now]) -> None:
        run, launch = self._run, self._run.launch
        stepping = any(now.total_steps > 0 for now in ranks.values())
        if launch is None or run.state is not State.RUNNING or launch.healthy or not stepping:
            return
        if run.clock.monotonic() - launch.started >= run.spec.config.restart.healthy_s:
            launch.healthy = True
            run.policy.healthy()

    def _watch_drops(self) -> None:
        due = self._run.clock.monotonic() - self._reported_at >= DROPS_EVERY_S
        if due or not self._run.relay.stuck:
            self.report_drops()

    def report_drops(self) -> None:
        """Report output dropped since the last report, if any."""
        dropped = self._run.relay.dropped_bytes - self._reported_bytes
        if dropped > 0:
            self._reported_bytes += dropped
            self._reported_at = self._run.clock.monotonic()
            self._run.runner.finding(
                event(
                    "output_dropped",
                    "warning",
                    f"OUTPUT DROPPED: {dropped} bytes of the miner's output; nothing reads "
                    "the guard's stdout",
                    dropped_bytes=dropped,
                )
            )
