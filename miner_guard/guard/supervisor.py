"""The supervisor: one thread that starts, monitors, stops and restarts the miner.

It is level-triggered: after every iteration of the loop, `step` compares the actual state (is the
launcher alive?) with the requested one (was a stop requested?) and takes the next action. A lost
signal or a failed step delays the action by one iteration; it never loses the launch.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from miner_guard.exits import CRASH_LOOP, FAILED
from miner_guard.guard.engines import RestartsInPlace
from miner_guard.guard.flights import Flights
from miner_guard.guard.keeper_client import Ending, KeeperClient, KeptMiner
from miner_guard.guard.lock import orphans_killed
from miner_guard.guard.loop import Loop
from miner_guard.guard.restart import (
    HEALTHY_S,
    Again,
    Attribution,
    Failure,
    GiveUp,
    RestartPolicy,
    how_it_ended,
)
from miner_guard.guard.states import LaunchSpec, State, StopRequest, Then
from miner_guard.rank.layout import Now
from miner_guard.record.events import degraded, event
from miner_guard.system.clock import Clock, OncePer
from miner_guard.watch.base import Exit, Launch
from miner_guard.watch.runner import MonitorRunner

TICK_S = 0.5
"""Interval between ticks. On average, it delays hang detection by half its length."""

_QUIET_S = 1.0
"""Interval while no rank has a record and the miner prints nothing."""

_DROPS_EVERY_S = 60.0


class Supervisor:
    """Supervises one `LaunchSpec`, and is the monitors' `SupervisorControl`. Only the methods of
    that, and `request_stop`, may be called outside `run`'s thread."""

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
        self.in_place = RestartsInPlace()
        self.state = State.STARTING
        self.launch: KeptMiner | None = None
        self.launches = 0
        self.exit_code: int | None = None
        self.reason = ""
        self.node_fault = ""
        """Why the miner cannot run on this machine, though it might on another."""

        self.paused = False
        self._relaunch_cause = ""
        """Why to relaunch between epochs; empty if nobody has asked."""

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

        self._save_until = self._kill_at = 0.0
        """Until when a stop waits for the ranks' checkpoint, and when its grace is over."""

        self._retry_at: float | None = None
        self._turn = 0
        self._repeats = OncePer(1.0)
        self._deliveries = -1
        self._quiet = False
        self._reported = [0, 0]
        """Bytes of output that were reported as dropped, and as unchecked."""

        self._drops = OncePer(_DROPS_EVERY_S)
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

    def restart(self, cause: str) -> None:
        self.request_stop(StopRequest(cause, Then.RESTART))

    def finish(self, cause: str) -> None:
        self.request_stop(StopRequest(cause, Then.FINISH))

    def relaunch(self, cause: str) -> None:
        self.request_stop(StopRequest(cause, Then.RELAUNCH))

    def relaunch_between_epochs(self, cause: str) -> str | None:
        """Relaunch once the miner is in none of the states in `restart.waits_in`; at once if asked
        again. Returns the state that it waits for, None if it does not wait."""
        state = None if self._relaunch_cause else self._costly_state(self.flights.headers())
        self._relaunch_cause = cause if state else ""
        if state is None:
            self.relaunch(cause)
        return state

    def _costly_state(self, ranks: Mapping[int, Now]) -> str | None:
        states = {now.phase or "training" for now in ranks.values()}
        return next((s for s in self.spec.config.restart.waits_in if s in states), None)

    def stop(self, cause: str, exit_code: int = 0) -> None:
        self.request_stop(StopRequest(cause, Then.STOP, exit_code))

    def use_command(self, command: Sequence[str]) -> None:
        self.loop.soon(lambda: self._use_command(command))

    def _use_command(self, command: Sequence[str]) -> None:
        self.spec = replace(self.spec, command=tuple(command))
        self.keeper.save(command=list(command))

    def pause(self) -> None:
        """Once the miner exits, do not restart it until `resume` is called."""
        self.paused = True
        self.keeper.save(paused=True)
        text = "MINER PAUSED: restarts are off until `miner-guard ctl resume`"
        self.runner.log(event("miner_paused", "info", text))
        if self.state is State.WAITING:
            self._cancel_retry()
            self.state = State.PAUSED

    def resume(self) -> None:
        """Undo `pause`; start the miner if it is not running."""
        self.paused = False
        self.keeper.save(paused=False)
        if self.state is State.PAUSED:
            self._launch()

    # --- the run ---

    def run(self) -> int:
        """Launch and supervise until the end; returns the guard's exit code."""
        self.loop.every(lambda: _QUIET_S if self._quiet else TICK_S, self.tick)
        if self.keeper.hello.last_guard is None:
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
        self.in_place.count = int(saved.get("in_place", 0))
        self.paused = bool(saved.get("paused"))
        self.spec = replace(self.spec, command=tuple(saved.get("command", self.spec.command)))
        if miner is not None:
            self.flights.launched(miner.attempt)
        # Without a miner, this drops the records of the last launch.
        self.flights.adopt(self.keeper.hello.held)
        if miner is None and (over := saved.get("over")) is not None:
            # The guard before this one died between the end of the run and its own.
            self._finish(*over)
            return
        if miner is None and self.paused:
            self.state = State.PAUSED
            return
        if miner is None:
            self._first_launch()
            return
        self.launch, self.state = miner, State.RUNNING
        self.runner.launch(
            Launch(tuple(self.spec.command), miner.pid, miner.attempt, miner.started)
        )

    def step(self) -> None:
        """Take the next action towards the requested state. Idempotent: safe to call at any
        time."""
        while self._requests:
            self._accept(self._requests.popleft())
        self._steps[self.state]()

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
        """For a repeated stop request, report how long ending the miner can still take."""
        now = self.clock.monotonic()
        # A second request means that the operator is in a hurry.
        self._save_until = 0.0
        kill_at = None if self.launch is None else self.launch.kill_at
        if stop_request.then is Then.STOP and kill_at is not None and self._repeats.ask(now):
            reason = f"{stop_request.cause}, and it is already stopping"
            self._log_stopping(reason, max(0.0, kill_at - now))

    def _log_stopping(self, reason: str, grace_s: float) -> None:
        text = f"MINER STOPPING: {reason}, {grace_s:.0f}s to stop"
        self.runner.log(event("miner_stopping", "info", text, reason=reason, grace_s=grace_s))

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
        self._stop_request, self._relaunch_cause = None, ""
        self.attribution.launched()
        self.in_place.launched()
        spec, attempt = self.spec, self.launches
        try:
            miner = self.keeper.launch(
                {
                    "command": list(spec.command),
                    "env": dict(spec.environment(attempt)),
                    "attempt": attempt,
                    "grace_s": spec.config.miner.stop_timeout_s,
                    "stop_signal": spec.config.miner.stop_signal,
                }
            )
        except OSError as error:
            self._launch_failed(error)
            return
        self.launches += 1
        self.keeper.save(launches=self.launches)
        self.launch, self.state = miner, State.RUNNING
        words = shlex.join(spec.command).replace("\n", "\\n")
        text = f"MINER STARTED: pid {miner.pid}: {words}"
        started = event(
            "miner_started", "info", text, pid=miner.pid, command=words, attempt=attempt
        )
        launch = Launch(tuple(spec.command), miner.pid, attempt, miner.started)
        self.loop.attempt(lambda: self.flights.launched(attempt))
        self.loop.attempt(lambda: self.runner.log(started))
        self.loop.attempt(lambda: self.runner.launch(launch))

    def _launch_failed(self, error: OSError) -> None:
        self.state = State.ENDING
        cause = f"the command could not be started: {error.strerror or error}"
        text = f"MINER EXITED: {cause}"
        self.runner.log(event("miner_exited", "error", text, how=cause, code=None, runtime_s=0.0))
        self._after_failure(Failure(cause, 0.0), FAILED)

    # --- a launch ---

    def _step_running(self) -> None:
        assert self.launch is not None
        if self.launch.exit is not None:
            self.state = State.ENDING
            self._step_ending()
        elif self._stop_request is not None:
            self._begin_stop(self.launch, self._stop_request)

    def _begin_stop(self, launch: KeptMiner, request: StopRequest) -> None:
        """Ask the ranks for a checkpoint, if they look for such requests, before the launcher gets
        its signal, which ends most ranks at once. Half of the grace is for that."""
        now, grace = self.clock.monotonic(), self.spec.config.miner.stop_timeout_s
        launch.stop_request, self.state = request, State.STOPPING
        # A restart or an exit code means that something is wrong with this launch.
        healthy = request.then in (Then.STOP, Then.RELAUNCH) and not request.exit_code
        saves = healthy and self.flights.has_saved() is not None
        if saves:
            self.flights.ask_checkpoint()
        self._save_until, self._kill_at = now + (grace / 2 if saves else 0.0), now + grace
        self._log_stopping(request.cause + (", after a checkpoint" if saves else ""), grace)
        self._step_stopping()

    def _step_stopping(self) -> None:
        assert self.launch is not None
        now = self.clock.monotonic()
        # The launcher may survive even SIGKILL; then the launch ends without its exit.
        if self.launch.exit is not None:
            self.state = State.ENDING
            self._step_ending()
        elif self.launch.kill_at is None and (
            now >= self._save_until or self.flights.has_saved() is not False
        ):
            self.keeper.stop(max(0.0, self._kill_at - now))

    def _step_ending(self) -> None:
        launch = self.launch
        if launch is None:
            # An exception kept the last step from deciding what comes next.
            if self._stop_request is not None and self._must_stop():
                self._finish(self._stop_request.exit_code, self._stop_request.cause)
            else:
                again = Again(self.spec.config.restart.backoff_s, self.launches)
                self._wait(again, "the last launch is over; see GUARD DEGRADED")
        elif launch.ended is not None:
            # Every process is gone: wrap up the launch, then decide what comes next.
            self.launch = None
            self.last_exit = end = self._wrap_up(launch, launch.ended)
            self.loop.attempt(lambda: self.runner.exit(end))
            if end.finished:
                self.keeper.save(over=self._finished)
            self.keeper.concluded()
            self._next(end, launch.stop_request)

    def _wrap_up(self, launch: KeptMiner, ending: Ending) -> Exit:
        """Read what the launch left behind, and report its end. A failed part does not affect the
        others."""
        attempt, request = self.loop.attempt, launch.stop_request
        attempt(lambda: self.flights.poll(last=True))
        attempt(lambda: self._report_teardown(ending))
        by_itself = ending.code == 0 and request is None
        verdicts: list[bool] = []
        if by_itself or (request is not None and request.then is Then.FINISH):
            attempt(lambda: verdicts.append(self._has_finished(launch)))
        runtime_s = self.clock.monotonic() - launch.started
        end = Exit(ending.code, ending.signal, request is not None, verdicts == [True], runtime_s)
        if launch.pid not in [pid for pid, _ in ending.stuck]:
            attempt(lambda: self._report_exit(end, request))
        return end

    def _has_finished(self, launch: KeptMiner) -> bool:
        """Return True if the miner finished its work."""
        miner = self.spec.config.miner
        if miner.finite or self.flights.all_in({"finished"}):
            return True
        if miner.finite is not None or miner.attach != "auto" or launch.stop_request is not None:
            return False
        self.runner.end_output()
        # It never said so, but every rank has stepped and reached the end of its program, and no
        # monitor objects: a loop that catches its exception and returns exits with 0 too.
        objections = self.runner.objections()
        ended = self.flights.all_in({"ended", "finished"})
        return not objections and self.flights.all_stepped() and ended

    def _report_teardown(self, ending: Ending) -> None:
        for killed in orphans_killed(self.spec.run_id, ending.killed, ending.killed_count):
            self.runner.log(killed)
        for pid, why in ending.stuck:
            what = f"pid {pid} did not exit in time after SIGKILL: {why}"
            self.runner.log(degraded(what))

    def _report_exit(self, end: Exit, request: StopRequest | None) -> None:
        how, runtime_s = how_it_ended(end), round(end.runtime_s, 3)
        facts: dict[str, Any] = {"code": end.code, "runtime_s": runtime_s}
        if end.finished:
            text = f"MINER FINISHED: {how} after {runtime_s:.0f}s"
            self.runner.log(event("miner_finished", "info", text, how=how, **facts))
            return
        how += f" as requested: {request.cause}" if request else " without being asked"
        if end.code == 0 and not request:
            how += (
                "; if the miner has finished its work, report that with "
                "guard.close(finished=True) or --finite ([miner] finite = true)"
            )
        exited = event("miner_exited", "error", f"MINER EXITED: {how}", how=how, **facts)
        self.runner.log(exited.at("info") if end.asked else exited)

    # --- what comes next ---

    def _next(self, end: Exit, stop_request: StopRequest | None) -> None:
        if stop_request is not None and stop_request.then is Then.STOP:
            self._finish(stop_request.exit_code, stop_request.cause)
        elif end.finished:
            self._finish(*self._finished)
        elif stop_request is None:
            self._after_failure(self.attribution.failure(end), end.code)
        elif stop_request.then is Then.RELAUNCH:
            self._stop_request = None
            self.state = State.WAITING
            self._launch_when_free()
        else:
            self._stop_request = None
            self._after_failure(Failure(stop_request.cause, end.runtime_s), FAILED)

    def _after_failure(self, failure: Failure, code: int) -> None:
        if not self.spec.config.restart.enabled:
            self._finish(code, f"restarts are off; the miner ended: {failure.cause}")
            return
        if self.paused:
            self.state = State.PAUSED
            return
        decision = self.policy.failed(failure)
        self.keeper.save(failures=self.policy.failures)
        if isinstance(decision, GiveUp):
            self.node_fault = decision.why if failure.kind == "hardware" else ""
            why, restarts = decision.why, self.policy.failures
            self.runner.log(
                event("crash_loop", "critical", f"CRASH LOOP: {why}", detail=why, restarts=restarts)
            )
            self._finish(CRASH_LOOP, f"crash loop: {why}")
            return
        self._wait(decision, failure.cause)

    def _wait(self, again: Again, cause: str) -> None:
        self.state = State.WAITING
        self._retry_at = self.clock.monotonic() + again.wait_s
        # Wake the loop, so that it runs `step`.
        self.loop.after(again.wait_s, lambda: None)
        limit = self.spec.config.restart.max_restarts
        which = f"attempt {again.attempt} of {limit}"
        text = f"MINER RESTARTING in {again.wait_s:.0f}s ({which}): {cause}"
        facts: dict[str, Any] = {"wait_s": again.wait_s, "attempt": again.attempt, "cause": cause}
        self.runner.log(event("miner_restarting", "warning", text, max_restarts=limit, **facts))

    def _cancel_retry(self) -> None:
        self._turn += 1
        self._retry_at = None

    def _finish(self, exit_code: int, reason: str) -> None:
        self._cancel_retry()
        self.state, self.exit_code, self.reason = State.DONE, exit_code, reason
        self.keeper.save(over=[exit_code, reason])

    @property
    def _finished(self) -> tuple[int, str]:
        return self.spec.finished_code, "the miner finished its work"

    # --- the tick ---

    def tick(self) -> None:
        """Deliver what is new to the monitors. If a part fails, the others still run."""
        attempt = self.loop.attempt
        if self.exit_code is not None:
            # The monitors have stopped; only their last messages still have to be sent.
            return
        now = self.clock.monotonic()
        self._quiet = not self.flights.identities() and self.runner.deliveries == self._deliveries
        self._deliveries = self.runner.deliveries
        attempt(self.flights.poll)
        ranks: dict[int, Now] = {}
        attempt(lambda: ranks.update(self.flights.headers()))
        attempt(lambda: self.runner.tick(now, ranks))
        attempt(lambda: self._watch_health(ranks))
        if self._relaunch_cause and self._costly_state(ranks) is None:
            self.relaunch_between_epochs(self._relaunch_cause)
        attempt(self._watch_replaced_ranks)
        due = self._drops.ask(now)
        if due or not self.keeper.stuck:
            attempt(lambda: self.report_missed_output(unchecked=due))

    def _watch_health(self, ranks: Mapping[int, Now]) -> None:
        launch = self.launch
        stepping = any(now.total_steps > 0 for now in ranks.values())
        if launch is None or self.state is not State.RUNNING or launch.healthy or not stepping:
            return
        if self.clock.monotonic() - launch.started >= HEALTHY_S:
            launch.healthy = True
            self.policy.healthy()
            self.keeper.save(failures=0)

    def _watch_replaced_ranks(self) -> None:
        # Without a launcher, another process of the program has begun to train.
        ranks = {
            rank: each for rank, each in self.flights.identities().items() if each.local_world_size
        }
        for each in self.in_place.replaced(ranks):
            self.keeper.save(in_place=self.in_place.count)
            self.runner.log(each)

    def report_missed_output(self, *, unchecked: bool = True) -> None:
        """Report output that no reader and, with `unchecked`, no monitor has taken since the last
        report, if any."""
        dropped, missed = (self.keeper.dropped_bytes, self.keeper.unchecked)
        dropped, self._reported[0] = dropped - self._reported[0], dropped
        if dropped > 0:
            what = (
                f"OUTPUT DROPPED: {dropped} bytes of the miner's; nothing reads the guard's stdout"
            )
            self.runner.log(degraded(what, dropped_bytes=dropped))
        if unchecked:
            missed, self._reported[1] = missed - self._reported[1], missed
            if missed > 0:
                what = f"{missed} bytes of the miner's output were passed on unchecked: "
                self.runner.log(degraded(what + "the monitors had fallen behind"))
