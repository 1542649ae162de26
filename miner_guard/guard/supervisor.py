"""The supervisor: one thread that starts, monitors, stops and restarts the miner.

It is level-triggered: after every iteration of the loop, `step` compares the actual state (is the
launcher alive?) with the requested one (was a stop requested?) and takes the next action. A lost
signal or a failed step delays the action by one iteration; it never loses the launch.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from miner_guard.exits import CRASH_LOOP, FAILED
from miner_guard.guard.child import Child
from miner_guard.guard.flights import Flights
from miner_guard.guard.launch import RETRY_INSPECT_S, ActiveLaunch
from miner_guard.guard.loop import Loop, Timer
from miner_guard.guard.process_tree import ProcessTree
from miner_guard.guard.relay import Relay
from miner_guard.guard.restart import (
    Again,
    Attribution,
    Failure,
    GiveUp,
    RestartPolicy,
    how_it_ended,
    ran_to_its_end,
)
from miner_guard.guard.states import LaunchSpec, RunEvent, State, StopRequest, Then, after
from miner_guard.guard.teardown import Teardown
from miner_guard.rank.layout import Now
from miner_guard.record.events import degraded, event
from miner_guard.system.clock import Clock
from miner_guard.system.once import Once
from miner_guard.watch.base import Exit, Launch
from miner_guard.watch.runner import MonitorRunner

DRAIN_S = 5.0
DRAIN_ASKED_S = 1.0
"""Time for the monitors to read the miner's last output: `DRAIN_S` after an unrequested exit,
`DRAIN_ASKED_S` after a requested stop. If they need longer, they see only the end of the remaining
output."""


class Supervisor:
    """Supervises one `LaunchSpec`. Only `request_stop` may be called outside `run`'s thread."""

    def __init__(
        self,
        spec: LaunchSpec,
        clock: Clock,
        loop: Loop,
        *,
        runner: MonitorRunner,
        relay: Relay,
        flights: Flights,
    ) -> None:
        self.spec, self.clock, self.loop = spec, clock, loop
        self.runner, self.relay, self.flights = runner, relay, flights
        self.policy = RestartPolicy(spec.config.restart)
        self.attribution = Attribution(clock)
        self.state = State.STARTING
        self.launch: ActiveLaunch | None = None
        self.launches = 0
        self.exit_code: int | None = None
        self.reason = ""
        self.paused = False
        self.last_exit: Exit | None = None
        self.on_stopping: Callable[[], None] = lambda: None
        self.before_first: Callable[[Callable[[], None], Callable[[int, str], None]], None] = (
            lambda go, _refuse: go()
        )
        """Called before the first launch. To launch, it calls its first argument; to refuse, it
        calls its second with an exit code and a reason."""
        self.before_next: Callable[[Callable[[], None]], None] = lambda proceed: proceed()
        """Called before every launch but the first. It calls its argument, in this thread, when the
        launch may proceed."""

        self._requests: deque[StopRequest] = deque()
        self._stop_request: StopRequest | None = None
        """The request that the next steps act on."""

        self._retry_at: float | None = None
        self._turn = 0
        self._alarm: Timer | None = None
        self.process_tree = ProcessTree(spec.state, clock)
        self.pulse = Pulse(self)
        self._conclusion = Conclusion(spec, loop, runner=runner, relay=relay, flights=flights)
        self._steps: Mapping[State, Callable[[], None]] = {
            State.STARTING: self._step_idle,
            State.WAITING: self._step_idle,
            State.PAUSED: self._step_idle,
            State.RUNNING: self._step_running,
            State.STOPPING: self._step_stopping,
            State.ENDING: self._step_ending,
            State.DONE: lambda: None,
        }

    @property
    def child(self) -> Child | None:
        """The current launch's launcher."""
        return None if self.launch is None else self.launch.child

    # --- requests ---

    def request_stop(self, stop_request: StopRequest) -> None:
        """End the current launch, or change what follows it. May be called from any thread."""
        self._requests.append(stop_request)
        self.loop.wake()

    def use_command(self, command: Sequence[str]) -> None:
        """Use this command from the next launch on."""
        self.spec = replace(self.spec, command=tuple(command))

    def pause(self) -> None:
        """Once the miner exits, do not restart it until `resume` is called."""
        self.paused = True
        self.runner.log(
            event(
                "miner_paused",
                "info",
                "MINER PAUSED: restarts are off until `miner-guard ctl resume`",
            )
        )
        if self.state is State.WAITING:
            self._cancel_retry()
            self._enter(RunEvent.HELD)

    def resume(self) -> None:
        """Undo `pause`; start the miner if it is not running."""
        self.paused = False
        if self.state is State.PAUSED:
            self._launch()

    # --- the run ---

    def run(self) -> int:
        """Launch and supervise until the end; returns the guard's exit code."""
        # SIGCHLD only shortens the loop's wait: `step` polls the launcher in any case.
        self.loop.on_signal(signal.SIGCHLD, self.process_tree.child_ended)
        self.loop.every(self.pulse.interval_s, self.pulse.tick)
        # From here on the watchdog expects progress: the first launch happens before the loop's
        # first iteration.
        self.loop.alive()
        self.before_first(self._first_launch, self._finish)
        while self.exit_code is None:
            self.loop.turn()
            self.loop.attempt(self.step)
        return self.exit_code

    def step(self) -> None:
        """Take the next action towards the requested state. Idempotent: safe to call at any
        time."""
        while self._requests:
            self._accept(self._requests.popleft())
        self._steps[self.state]()

    def _enter(self, event: RunEvent) -> None:
        self.state = after(self.state, event)

    def _step_again_in(self, seconds: float) -> None:
        """Wake the loop in `seconds` so that it runs `step`."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self.loop.after(seconds, lambda: None)

    def _must_stop(self) -> bool:
        return self._stop_request is not None and self._stop_request.then is Then.STOP

    def _accept(self, stop_request: StopRequest) -> None:
        if self.state is State.DONE:
            return
        if self._must_stop():
            self._report_ending(stop_request)
            return
        if stop_request.then in (Then.RESTART, Then.FINISH) and self.state is not State.RUNNING:
            # The request targeted a launch that has since ended: the restart policy decides what
            # follows, with its backoff.
            return
        # From here on, the request is carried out whatever fails below.
        self._stop_request = stop_request
        if stop_request.then is Then.STOP:
            self.loop.attempt(self.on_stopping)
        if self.launch is not None:
            self.launch.stop_request = stop_request
            self._report_ending(stop_request)

    def _report_ending(self, stop_request: StopRequest) -> None:
        """For a repeated stop request, report what the teardown is waiting for and how long that
        can take."""
        teardown = self.launch.teardown if self.launch is not None else None
        if stop_request.then is Then.STOP and teardown is not None and teardown.may_report():
            reason = f"{stop_request.cause}, and it is already stopping: {teardown.waits_for()}"
            self.runner.log(
                event(
                    "miner_stopping",
                    "info",
                    f"MINER STOPPING: {reason}, {teardown.left_s():.0f}s to stop",
                    reason=reason,
                    grace_s=teardown.left_s(),
                )
            )

    # --- between launches ---

    def _step_idle(self) -> None:
        if self._stop_request is not None:
            if self._stop_request.then is Then.STOP:
                self._finish(self._stop_request.exit_code, self._stop_request.cause)
            else:
                self._launch()
        elif self._retry_at is not None and self.clock.monotonic() >= self._retry_at:
            self._retry_at = None
            self._launch_when_free()

    def _launch_when_free(self) -> None:
        """Launch once the previous launch's resources are free, unless a stop or another start
        comes first."""
        self._turn += 1
        turn = self._turn

        def proceed() -> None:
            if self.state is State.WAITING and turn == self._turn and self._stop_request is None:
                self._launch()

        if not self.loop.attempt(lambda: self.before_next(proceed)):
            proceed()

    def _first_launch(self) -> None:
        # An operator may have requested a start or a stop during the preflight.
        if self.state is State.STARTING and self._stop_request is None and not self._requests:
            self._launch()

    def _launch(self) -> None:
        if self._must_stop():
            return
        self._cancel_retry()
        self._stop_request = None
        self.attribution.launched()
        attempt = self.launches
        try:
            child = self._start_child(attempt)
        except OSError as error:
            self._launch_failed(error)
            return
        self.launches += 1
        now = self.clock.monotonic()
        self.launch = ActiveLaunch(child, attempt, now, self.clock, self.process_tree)
        self._enter(RunEvent.LAUNCHED)
        words = shlex.join(self.spec.command).replace("\n", "\\n")
        for work in (
            lambda: self.flights.launched(child.pid),
            lambda: self.runner.log(
                event(
                    "miner_started",
                    "info",
                    f"MINER STARTED: pid {child.pid}: {words}",
                    pid=child.pid,
                    command=words,
                    attempt=attempt,
                )
            ),
            lambda: self.runner.launch(Launch(tuple(self.spec.command), child.pid, attempt, now)),
        ):
            self.loop.attempt(work)
        # The child may have exited before the SIGCHLD handler was in place.
        self.loop.wake()

    def _start_child(self, attempt: int) -> Child:
        stdout, stderr = self.relay.open()
        try:
            return Child(
                self.spec.command,
                self.spec.environment(attempt),
                stdout=stdout,
                stderr=stderr,
                join=self.process_tree.open_to_join(),
            )
        finally:
            for end in {stdout, stderr}:
                os.close(end)

    def _launch_failed(self, error: OSError) -> None:
        self._enter(RunEvent.LAUNCH_FAILED)
        cause = f"the command could not be started: {error.strerror or error}"
        self.runner.log(
            event(
                "miner_exited",
                "error",
                f"MINER EXITED: {cause}",
                how=cause,
                code=None,
                runtime_s=0.0,
            )
        )
        self._after_failure(Failure(cause, 0.0), FAILED)

    # --- a launch ---

    def _step_running(self) -> None:
        assert self.launch is not None
        if self.launch.gone():
            self._launcher_gone(self.launch)
        elif self._stop_request is not None:
            grace = self.spec.config.miner.stop_timeout_s
            self.launch.stop_request = self._stop_request
            self.launch.ask_to_end(grace)
            self._enter(RunEvent.STOP_BEGUN)
            self.runner.log(
                event(
                    "miner_stopping",
                    "info",
                    f"MINER STOPPING: {self._stop_request.cause}, {grace:.0f}s to stop",
                    reason=self._stop_request.cause,
                    grace_s=grace,
                )
            )
            self._step_stopping()

    def _step_stopping(self) -> None:
        assert self.launch is not None
        if self.launch.gone():
            self._launcher_gone(self.launch)
        elif self._torn_down(self.launch):
            # The launcher survived SIGKILL.
            self._enter(RunEvent.LAUNCHER_GONE)
            self._step_ending()

    def _launcher_gone(self, launch: ActiveLaunch) -> None:
        launch.launcher_ended()
        self._enter(RunEvent.LAUNCHER_GONE)
        self._step_ending()

    def _torn_down(self, launch: ActiveLaunch) -> bool:
        """Run the teardown; True when every process of the launch is gone or can't be killed."""
        try:
            again = launch.step()
        except OSError as error:
            # If no descriptor is free to read /proc, assume that the processes are still alive.
            self.pulse.report_blind(error)
            again = RETRY_INSPECT_S
        if again is not None:
            self._step_again_in(again)
        return again is None

    def _step_ending(self) -> None:
        launch = self.launch
        if launch is None:
            self._next_after_defect()
        elif launch.drain_until is None:
            if self._torn_down(launch):
                seconds = DRAIN_S if launch.stop_request is None else DRAIN_ASKED_S
                launch.drain_until = self.clock.monotonic() + seconds
                self.loop.attempt(self.relay.end_sources)
                self._step_ending()
        elif not self.relay.pending or self.clock.monotonic() >= launch.drain_until:
            self._conclude(launch)

    def _conclude(self, launch: ActiveLaunch) -> None:
        """Every process is gone: wrap up the launch, then decide what comes next."""
        self.launch = None
        self.last_exit = end = self._conclusion.of(launch)
        self.loop.attempt(lambda: self.runner.exit(end))
        self._next(end, launch.stop_request)

    def _next(self, end: Exit, stop_request: StopRequest | None) -> None:
        if stop_request is not None and stop_request.then is Then.STOP:
            self._finish(stop_request.exit_code, stop_request.cause)
        elif end.finished:
            self._finish(self.spec.finished_code, "the miner finished its work")
        elif stop_request is None:
            self._after_failure(self.attribution.failure(end), end.code)
        elif stop_request.then is Then.RELAUNCH:
            self._stop_request = None
            self._enter(RunEvent.RETRY_PLANNED)
            self._launch_when_free()
        else:
            self._stop_request = None
            self._after_failure(Failure(stop_request.cause, end.runtime_s), FAILED)

    def _next_after_defect(self) -> None:
        """Decide what comes next after an exception kept `_conclude` from doing so."""
        if self._stop_request is not None and self._must_stop():
            self._finish(self._stop_request.exit_code, self._stop_request.cause)
        else:
            restart = self.spec.config.restart
            self._wait(
                Again(restart.backoff_s, self.launches),
                "the last launch is over; see GUARD DEGRADED",
            )

    def _after_failure(self, failure: Failure, code: int) -> None:
        if not self.spec.config.restart.enabled:
            self._finish(code, f"restarts are off; the miner ended: {failure.cause}")
            return
        if self.paused:
            self._enter(RunEvent.HELD)
            return
        decision = self.policy.failed(failure)
        if isinstance(decision, GiveUp):
            self.runner.log(
                event(
                    "crash_loop",
                    "critical",
                    f"CRASH LOOP: {decision.why}",
                    detail=decision.why,
                    restarts=self.policy.failures,
                )
            )
            self._finish(CRASH_LOOP, f"crash loop: {decision.why}")
            return
        self._wait(decision, failure.cause)

    def _wait(self, again: Again, cause: str) -> None:
        self._enter(RunEvent.RETRY_PLANNED)
        self._retry_at = self.clock.monotonic() + again.wait_s
        self._step_again_in(again.wait_s)
        limit = self.spec.config.restart.max_restarts
        self.runner.log(
            event(
                "miner_restarting",
                "warning",
                f"MINER RESTARTING in {again.wait_s:.0f}s (attempt {again.attempt} of "
                f"{limit}): {cause}",
                wait_s=again.wait_s,
                attempt=again.attempt,
                max_restarts=limit,
                cause=cause,
            )
        )

    def _cancel_retry(self) -> None:
        self._turn += 1
        self._retry_at = None

    def _finish(self, exit_code: int, reason: str) -> None:
        self._cancel_retry()
        self._enter(RunEvent.FINISHED)
        self.exit_code, self.reason = exit_code, reason


DROPS_EVERY_S = 60.0
TICK_S = 0.5
"""Interval between ticks. On average, it delays hang detection by half its length."""

_QUIET_S = 1.0
"""Interval while no rank has a flight record and the miner prints nothing."""


class Pulse:
    """Runs the tick twice a second, or once a second while nothing is happening. If a step of the
    tick fails, the others still run."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._run = supervisor
        self._blind = Once()
        self._reported_bytes = 0
        self._reported_at = 0.0
        self._unchecked_bytes = 0
        self._unchecked_at = float("-inf")
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
            self._run.runner.log(degraded(what))

    def _watch_health(self, ranks: Mapping[int, Now]) -> None:
        run, launch = self._run, self._run.launch
        stepping = any(now.total_steps > 0 for now in ranks.values())
        if launch is None or run.state is not State.RUNNING or launch.healthy or not stepping:
            return
        if run.clock.monotonic() - launch.started >= run.spec.config.restart.healthy_s:
            launch.healthy = True
            run.policy.healthy()

    def _watch_drops(self) -> None:
        now = self._run.clock.monotonic()
        if now - self._reported_at >= DROPS_EVERY_S or not self._run.relay.stuck:
            self.report_drops()
        if now - self._unchecked_at >= DROPS_EVERY_S:
            self.report_unchecked()

    def report_unchecked(self) -> None:
        """Report output that the monitors have missed since the last report, if any."""
        missed = self._run.relay.unchecked - self._unchecked_bytes
        if missed > 0:
            self._unchecked_bytes += missed
            self._unchecked_at = self._run.clock.monotonic()
            what = f"{missed} bytes of the miner's output were passed on unchecked: "
            self._run.runner.log(degraded(what + "the monitors had fallen behind"))

    def report_drops(self) -> None:
        """Report output dropped since the last report, if any."""
        dropped = self._run.relay.dropped_bytes - self._reported_bytes
        if dropped > 0:
            self._reported_bytes += dropped
            self._reported_at = self._run.clock.monotonic()
            self._run.runner.log(
                event(
                    "output_dropped",
                    "warning",
                    f"OUTPUT DROPPED: {dropped} bytes of the miner's output; nothing reads "
                    "the guard's stdout",
                    dropped_bytes=dropped,
                )
            )


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
            self._relay.show_rest,
            lambda: self._flights.last_poll(self._runner),
            lambda: self._report_teardown(launch.teardown),
        ):
            self._loop.attempt(work)
        end = launch.exit(self._has_finished(launch))
        self._loop.attempt(lambda: self._report_exit(end, launch.stop_request))
        return end

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
            for each in teardown.report(self._spec.run_id):
                self._runner.log(each)

    def _report_exit(self, end: Exit, stop_request: StopRequest | None) -> None:
        runtime = round(end.runtime_s, 3)
        if end.finished:
            self._runner.log(
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
        logged = event(
            "miner_exited",
            "error",
            f"MINER EXITED: {how}",
            how=how,
            code=end.code,
            runtime_s=runtime,
        )
        self._runner.log(logged.at("info") if end.asked else logged)
