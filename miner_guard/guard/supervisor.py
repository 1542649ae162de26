"""The supervisor: one thread that starts, monitors, stops and restarts the miner.

It is level-triggered: after every iteration of the loop, `step` compares the actual state (is the
launcher alive?) with the requested one (was a stop requested?) and takes the next action. A lost
signal or a failed step delays the action by one iteration; it never loses the launch.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from miner_guard.exits import CRASH_LOOP, FAILED
from miner_guard.guard.flights import Flights
from miner_guard.guard.keeper_client import Ending, KeeperClient, KeptMiner
from miner_guard.guard.loop import Loop, Timer
from miner_guard.guard.orphans import orphans_killed
from miner_guard.guard.restart import (
    HEALTHY_S,
    Again,
    Attribution,
    Failure,
    GiveUp,
    RestartPolicy,
    how_it_ended,
    ran_to_its_end,
)
from miner_guard.guard.states import LaunchSpec, RunEvent, State, StopRequest, Then, after
from miner_guard.rank.layout import Now
from miner_guard.record.events import degraded, event
from miner_guard.system.clock import Clock
from miner_guard.system.once import Once, OncePer
from miner_guard.watch.base import Exit, Launch
from miner_guard.watch.runner import MonitorRunner


@dataclass
class ActiveLaunch:
    """One active launch. Supervisor thread only."""

    miner: KeptMiner
    stop_request: StopRequest | None = None
    """The request that ends this launch; None if nobody has requested a stop."""

    healthy: bool = False
    """The launch ran long enough to reset the failure count."""

    @property
    def attempt(self) -> int:
        return self.miner.attempt

    @property
    def started(self) -> float:
        """Monotonic seconds."""
        return self.miner.started


class Supervisor:
    """Supervises one `LaunchSpec`. Only `request_stop` may be called outside `run`'s thread."""

    def __init__(
        self,
        spec: LaunchSpec,
        clock: Clock,
        loop: Loop,
        *,
        runner: MonitorRunner,
        keeper: KeeperClient,
        flights: Flights,
    ) -> None:
        self.spec, self.clock, self.loop = spec, clock, loop
        self.runner, self.keeper, self.flights = runner, keeper, flights
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
        self._repeats = OncePer(1.0)
        self._alarm: Timer | None = None
        self.pulse = Pulse(self)
        self._conclusion = Conclusion(spec, clock, loop, runner=runner, flights=flights)
        self._steps: Mapping[State, Callable[[], None]] = {
            State.STARTING: self._step_idle,
            State.WAITING: self._step_idle,
            State.PAUSED: self._step_idle,
            State.RUNNING: self._step_running,
            State.STOPPING: self._step_stopping,
            State.ENDING: self._step_ending,
            State.DONE: lambda: None,
        }

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
        self.loop.every(self.pulse.interval_s, self.pulse.tick)
        if self.keeper.hello.first:
            self.before_first(self._first_launch, self._finish)
        else:
            self._take_over()
        while self.exit_code is None:
            self.loop.turn()
            self.loop.attempt(self.step)
        return self.exit_code

    def _take_over(self) -> None:
        """Continue the run of a guard that died: its miner is still running, or is to be
        launched."""
        saved, miner = self.keeper.hello.saved, self.keeper.miner
        self.launches = int(saved.get("launches", 0))
        self.policy.restore(saved.get("failures", 0))
        if miner is None:
            self._first_launch()
            return
        self.launch = ActiveLaunch(miner)
        self._enter(RunEvent.LAUNCHED)
        words = tuple(self.spec.command)
        self.flights.launched(miner.attempt)
        self.flights.adopt(self.keeper.hello.held)
        self.runner.launch(Launch(words, miner.pid, miner.attempt, miner.started))

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
        """For a repeated stop request, report what the keeper is waiting for and how long that
        can take."""
        miner = None if self.launch is None else self.launch.miner
        if stop_request.then is not Then.STOP or miner is None or miner.asked_at is None:
            return
        if self._repeats.ask(self.clock.monotonic()):
            left_s = miner.left_s()
            reason = f"{stop_request.cause}, and it is already stopping: {miner.waits_for()}"
            self.runner.log(
                event(
                    "miner_stopping",
                    "info",
                    f"MINER STOPPING: {reason}, {left_s:.0f}s to stop",
                    reason=reason,
                    grace_s=left_s,
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
            miner = self._start_miner(attempt)
        except OSError as error:
            self._launch_failed(error)
            return
        self.launches += 1
        self.keeper.save(launches=self.launches)
        self.launch = ActiveLaunch(miner)
        self._enter(RunEvent.LAUNCHED)
        words = shlex.join(self.spec.command).replace("\n", "\\n")
        for work in (
            lambda: self.flights.launched(attempt),
            lambda: self.runner.log(
                event(
                    "miner_started",
                    "info",
                    f"MINER STARTED: pid {miner.pid}: {words}",
                    pid=miner.pid,
                    command=words,
                    attempt=attempt,
                )
            ),
            lambda: self.runner.launch(
                Launch(tuple(self.spec.command), miner.pid, attempt, miner.started)
            ),
        ):
            self.loop.attempt(work)

    def _start_miner(self, attempt: int) -> KeptMiner:
        spec = self.spec
        return self.keeper.launch(
            {
                "command": list(spec.command),
                "env": dict(spec.environment(attempt)),
                "attempt": attempt,
                "grace_s": spec.config.miner.stop_timeout_s,
                "cgroup": spec.config.miner.cgroup,
                "state_dir": str(spec.state.root),
                "run_id": spec.run_id,
            }
        )

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
        if self.launch.miner.exit is not None:
            self._enter(RunEvent.LAUNCHER_GONE)
            self._step_ending()
        elif self._stop_request is not None:
            grace = self.spec.config.miner.stop_timeout_s
            self.launch.stop_request = self._stop_request
            self.keeper.stop(grace)
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

    def _step_stopping(self) -> None:
        assert self.launch is not None
        # The launcher may survive even SIGKILL; then the launch ends without its exit.
        if self.launch.miner.exit is not None:
            self._enter(RunEvent.LAUNCHER_GONE)
            self._step_ending()

    def _step_ending(self) -> None:
        launch = self.launch
        if launch is None:
            self._next_after_defect()
        elif launch.miner.ended is not None:
            self._conclude(launch, launch.miner.ended)

    def _conclude(self, launch: ActiveLaunch, ending: Ending) -> None:
        """Every process is gone: wrap up the launch, then decide what comes next."""
        self.launch = None
        self.last_exit = end = self._conclusion.of(launch, ending)
        self.loop.attempt(lambda: self.runner.exit(end))
        self.keeper.concluded()
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
        self.keeper.save(failures=self.policy.failures)
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
"""Interval while no rank has a record and the miner prints nothing."""


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
        attempt(lambda: run.flights.poll())
        ranks: dict[int, Now] = {}
        attempt(lambda: ranks.update(run.flights.headers()))
        attempt(lambda: run.runner.tick(now, ranks))
        attempt(lambda: self._watch_health(ranks))
        attempt(self._watch_drops)

    def report_blind(self, why: str) -> None:
        """Report, once per run, that the keeper can't inspect the miner's processes."""
        if self._blind.first():
            what = f"cannot inspect the miner's processes ({why}); retrying"
            self._run.runner.log(degraded(what))

    def _watch_health(self, ranks: Mapping[int, Now]) -> None:
        run, launch = self._run, self._run.launch
        stepping = any(now.total_steps > 0 for now in ranks.values())
        if launch is None or run.state is not State.RUNNING or launch.healthy or not stepping:
            return
        if run.clock.monotonic() - launch.started >= HEALTHY_S:
            launch.healthy = True
            run.policy.healthy()
            run.keeper.save(failures=0)

    def _watch_drops(self) -> None:
        now = self._run.clock.monotonic()
        if now - self._reported_at >= DROPS_EVERY_S or not self._run.keeper.stuck:
            self.report_drops()
        if now - self._unchecked_at >= DROPS_EVERY_S:
            self.report_unchecked()

    def report_unchecked(self) -> None:
        """Report output that the monitors have missed since the last report, if any."""
        missed = self._run.keeper.unchecked - self._unchecked_bytes
        if missed > 0:
            self._unchecked_bytes += missed
            self._unchecked_at = self._run.clock.monotonic()
            what = f"{missed} bytes of the miner's output were passed on unchecked: "
            self._run.runner.log(degraded(what + "the monitors had fallen behind"))

    def report_drops(self) -> None:
        """Report output dropped since the last report, if any."""
        dropped = self._run.keeper.dropped_bytes - self._reported_bytes
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
        self, spec: LaunchSpec, clock: Clock, loop: Loop, *, runner: MonitorRunner, flights: Flights
    ) -> None:
        self._spec, self._clock, self._loop = spec, clock, loop
        self._runner, self._flights = runner, flights

    def of(self, launch: ActiveLaunch, ending: Ending) -> Exit:
        """Wrap up `launch` and return how it ended."""
        for work in (self._flights.last_poll, lambda: self._report_teardown(ending)):
            self._loop.attempt(work)
        asked = launch.stop_request
        by_itself = ending.code == 0 and asked is None
        finished = self._has_finished(launch) and (
            by_itself or (asked is not None and asked.then is Then.FINISH)
        )
        runtime_s = self._clock.monotonic() - launch.started
        end = Exit(ending.code, ending.signal, asked is not None, finished, runtime_s)
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

    def _report_teardown(self, ending: Ending) -> None:
        for killed in orphans_killed(self._spec.run_id, ending.killed, ending.killed_count):
            self._runner.log(killed)
        for pid, why in ending.stuck:
            what = f"pid {pid} did not exit in time after SIGKILL: {why}"
            self._runner.log(degraded(what))

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
