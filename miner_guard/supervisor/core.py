"""The supervisor: one thread that starts the miner, hears it, ends it, and starts it again.

States: `starting` ▶ `running` ▶ `stopping` (the guard asked) or `ending` (it ended by itself, its remains are
ended) ▶ `waiting` (for the next start) or `paused` or `done`.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from miner_guard.clock import Clock, iso_utc
from miner_guard.events import found
from miner_guard.exits import CRASH_LOOP, FAILED
from miner_guard.flight_recorder.records import Now
from miner_guard.supervisor.attribution import Attribution, how_it_ended
from miner_guard.supervisor.child import Child
from miner_guard.supervisor.family import Family
from miner_guard.supervisor.flights import Flights
from miner_guard.supervisor.host import Host
from miner_guard.supervisor.loop import Loop, Timer
from miner_guard.supervisor.orders import Order, Wish
from miner_guard.supervisor.parts import Exit, Launch
from miner_guard.supervisor.processes import Process
from miner_guard.supervisor.relay import Relay
from miner_guard.supervisor.restart import Again, Failure, GiveUp, RestartPolicy
from miner_guard.supervisor.teardown import Teardown

TICK_S = 0.5
"""Half of it is the mean delay with which a hang is noticed."""
BLIND_S = 1.0
"""Until the next look at processes that could not be looked at."""

DROPS_EVERY_S = 60.0


class Supervisor:
    """Supervises one order. All methods but `want` belong to the thread that calls `run`."""

    def __init__(self, order: Order, clock: Clock, loop: Loop, host: Host, relay: Relay, flights: Flights) -> None:
        self.order, self.clock, self.loop, self.host, self.relay, self.flights = (
            order, clock, loop, host, relay, flights,
        )  # fmt: skip
        self.policy = RestartPolicy(order.config.restart)
        self.attribution = Attribution(clock)
        self.state = "starting"
        self.child: Child | None = None
        self.launches = 0
        self.exit_code: int | None = None
        self.reason = ""
        self.paused = False
        self.last_exit: Exit | None = None
        self.on_stopping: Callable[[], None] = lambda: None
        self.before_first: Callable[[Callable[[], None], Callable[[int, str], None]], None] = lambda go, _refuse: go()
        """Asked before the first launch: calls the first to launch, or the second with an exit code and a reason."""
        self.before_next: Callable[[Callable[[], None]], None] = lambda proceed: proceed()
        """Called before every launch but the first; it calls back in this thread when the way is free."""

        self._turn = 0
        self._launched_at = 0.0
        self._wish: Wish | None = None
        self._teardown: Teardown | None = None
        self._teardown_timer: Timer | None = None
        self._wait_timer: Timer | None = None
        self._family = Family(order.state, clock)
        self._healthy_said = False
        self._blind_said = False
        self._dropped_said = 0
        self._drops_said_at = 0.0

    # --- what others ask for ---

    def want(self, wish: Wish) -> None:
        """End the current launch, or change what comes after it. Safe from any thread."""
        self.loop.soon(lambda: self._wanted(wish))

    def _wanted(self, wish: Wish) -> None:
        if self.state == "done":
            return
        if self._wish is not None and self._wish.then == "stop":
            self._say_ending(wish)
            return
        if wish.then == "restart" and self.state != "running":
            # It was meant for a launch that has ended since: what comes next is the policy's, with its wait.
            return
        if wish.then == "stop":
            self.on_stopping()
        if self.state in ("waiting", "paused", "starting"):
            self._cancel_wait()
            if wish.then == "stop":
                self._done(wish.exit_code, wish.cause)
            else:
                self._launch()
            return
        self._wish = wish
        if self.state == "running":
            self._stop_child(wish.cause)
        else:
            self._say_ending(wish)

    def _say_ending(self, wish: Wish) -> None:
        """Whoever asks again for the end is told what it waits for, and how long at most."""
        if wish.then == "stop" and self._teardown is not None and self._teardown.may_say():
            reason = f"{wish.cause}, and it is ending already: {self._teardown.waits_for()}"
            self.host.finding(found("miner_stopping", reason=reason, grace_s=self._teardown.left_s()))

    def use_command(self, command: Sequence[str]) -> None:
        """The miner's command from the next launch on."""
        self.order = replace(self.order, command=tuple(command))

    def pause(self) -> None:
        """A miner that ends is not started again until `resume`."""
        self.paused = True
        self.host.finding(found("miner_paused"))
        if self.state == "waiting":
            self._cancel_wait()
            self.state = "paused"

    def resume(self) -> None:
        """Undo `pause`; start the miner if it is not running."""
        self.paused = False
        if self.state == "paused":
            self._launch()

    # --- the life of a launch ---

    def run(self) -> int:
        """Launch and supervise until the end; returns the guard's exit code."""
        self.loop.on_signal(signal.SIGCHLD, self._child_changed)
        self.loop.after(TICK_S, self._tick)
        self.before_first(self._first_launch, self._done)
        while self.exit_code is None:
            self.loop.turn()
        return self.exit_code

    def _first_launch(self) -> None:
        # A person may have asked for a start, or a stop, while the preflight was looking.
        if self.state == "starting":
            self._launch()

    def _launch(self) -> None:
        self._cancel_wait()
        self._wish, self._teardown, self._healthy_said = None, None, False
        self.attribution.launched()
        attempt = self.launches
        try:
            stdout, stderr = self.relay.open()
        except OSError as error:
            self.relay.close_sources()
            self._start_failed(error)
            return
        try:
            self.child = Child(self.order.command, self.order.environment(attempt), stdout, stderr)
        except OSError as error:
            self.relay.close_sources()
            self._start_failed(error)
            return
        finally:
            for end in {stdout, stderr}:
                os.close(end)
        self.launches += 1
        self._launched_at = self.clock.monotonic()
        self.flights.launched(self.child.pid)
        self.state = "running"
        words = shlex.join(self.order.command).replace("\n", "\\n")
        self.host.finding(found("miner_started", pid=self.child.pid, command=words, attempt=attempt))
        self.host.launch(Launch(tuple(self.order.command), self.child.pid, attempt, self._launched_at))
        # A child that is gone before SIGCHLD was watched.
        self.loop.soon(self._child_changed)

    def _start_failed(self, error: OSError) -> None:
        self.child = None
        self.state = "ending"
        cause = f"the command could not be started: {error.strerror or error}"
        self.host.finding(found("miner_exited", how=cause, code=None, runtime_s=0.0))
        self._after_failure(Failure(cause, 0.0), FAILED)

    def _stop_child(self, cause: str) -> None:
        assert self.child is not None
        self.state = "stopping"
        grace = self.order.config.miner.stop_timeout_s
        self.host.finding(found("miner_stopping", reason=cause, grace_s=grace))
        self._teardown = Teardown(self.clock, self._leftovers, self.child.process, grace)
        self._teardown.ask()
        self._step_teardown()

    def _child_changed(self) -> None:
        if self.child is None or self.state not in ("running", "stopping") or self.child.code() is None:
            return
        if self._teardown is None:
            self._teardown = Teardown(self.clock, self._leftovers, self.child.process, 0.0)
        self.state = "ending"
        self._teardown.ended()
        self._step_teardown()

    def _step_teardown(self) -> None:
        if self._teardown_timer is not None:
            self._teardown_timer.cancel()
        if self._teardown is None:
            return
        if self.state != "ending" and self.child is not None and self.child.code() is not None:
            self._child_changed()
            return
        try:
            again = self._teardown.step()
        except OSError as error:
            # No descriptor to look through /proc with: nothing is known to be gone, so it is looked again.
            self._say_blind(error)
            again = BLIND_S
        if again is not None:
            self._teardown_timer = self.loop.after(again, self._step_teardown)
        elif self.child is not None:
            self._ended(self.child, self._teardown)

    def _say_blind(self, error: OSError) -> None:
        if not self._blind_said:
            self._blind_said = True
            what = f"the miner's processes can't be looked at ({error.strerror}); it is tried again until they can"
            self.host.finding(found("guard_degraded", what=what))

    def _leftovers(self) -> set[Process]:
        assert self.child is not None
        return self._family.leftovers(self.child.process)

    def _ended(self, child: Child, teardown: Teardown) -> None:
        """Nothing of the launch is left: hand over its last words, then decide what comes next."""
        self._teardown = None
        self.relay.drain()
        self.flights.last_look(self.host)
        for process, command in teardown.killed:
            self.host.finding(found("orphan_killed", pid=process.pid, command=command, of_run=self.order.run_id))
        for process in teardown.stuck:
            what = f"pid {process.pid} does not end, not even by SIGKILL: it waits in the kernel (D state)"
            self.host.finding(found("guard_degraded", what=what))
        self.relay.close_sources()
        end = self._exit_of(child)
        self.last_exit = end
        self.child = None
        self._say_exit(end)
        self.host.exit(end)
        self._next(end)

    def _exit_of(self, child: Child) -> Exit:
        code = child.code()
        if code is None:
            # It waits in the kernel and will never be reaped: it has had its SIGKILL, and the guard goes on.
            code = 128 + signal.SIGKILL
        by_itself = self._wish is None
        said = self.order.config.miner.finite or self.flights.all_finished()
        runtime = self.clock.monotonic() - self._launched_at
        return Exit(code, child.signal, not by_itself, code == 0 and by_itself and said, runtime)

    def _say_exit(self, end: Exit) -> None:
        runtime = round(end.runtime_s, 3)
        if end.finished:
            self.host.finding(found("miner_finished", how=f"code {end.code}", code=end.code, runtime_s=runtime))
            return
        how = f"{how_it_ended(end)} {_asked(self._wish)}"
        if end.code == 0 and not end.asked:
            how += (
                "; where it has finished its work, it must say so: guard.close(finished=True) or [miner] finite = true"
            )
        finding = found("miner_exited", how=how, code=end.code, runtime_s=runtime)
        self.host.finding(finding.at("info") if end.asked else finding)

    def _next(self, end: Exit) -> None:
        wish = self._wish
        if wish is not None and wish.then == "stop":
            self._done(wish.exit_code, wish.cause)
        elif end.finished:
            self._done(self.order.finished_code, "the miner finished its work")
        elif wish is not None and wish.then == "relaunch":
            self.state = "waiting"
            self._start_again()
        elif wish is not None:
            self._after_failure(Failure(wish.cause, end.runtime_s), FAILED)
        else:
            self._after_failure(self.attribution.failure(end), end.code)

    def _after_failure(self, failure: Failure, code: int) -> None:
        if not self.order.config.restart.enabled:
            self._done(code, f"restarts are off; the miner ended: {failure.cause}")
            return
        if self.paused:
            self.state = "paused"
            return
        decision = self.policy.failed(failure)
        if isinstance(decision, GiveUp):
            self.host.finding(found("crash_loop", detail=decision.why, restarts=self.policy.failures))
            self._done(CRASH_LOOP, f"crash loop: {decision.why}")
            return
        self._wait(decision, failure.cause)

    def _wait(self, again: Again, cause: str) -> None:
        self.state = "waiting"
        self._wait_timer = self.loop.after(again.wait_s, self._start_again)
        most = self.order.config.restart.max_restarts
        self.host.finding(
            found("miner_restarting", wait_s=again.wait_s, attempt=again.attempt, max_restarts=most, cause=cause)
        )

    def _start_again(self) -> None:
        """Launch when what the last launch held is free; a stop or another start meanwhile takes this back."""
        self._turn += 1
        turn = self._turn
        self.before_next(lambda: self._launch() if self.state == "waiting" and turn == self._turn else None)

    def _cancel_wait(self) -> None:
        self._turn += 1
        if self._wait_timer is not None:
            self._wait_timer.cancel()
            self._wait_timer = None

    def _done(self, exit_code: int, reason: str) -> None:
        self._cancel_wait()
        self.state, self.exit_code, self.reason = "done", exit_code, reason

    # --- the pulse ---

    def _tick(self) -> None:
        self.loop.after(TICK_S, self._tick)
        self.relay.tick()
        if self.exit_code is not None:
            # The parts have ended; only their last words are waited for.
            return
        self.flights.look(self.host)
        ranks = self.flights.now()
        self.host.tick(self.clock.monotonic(), ranks)
        self._watch_health(ranks)
        self._watch_drops()
        self._watch_family()

    def _watch_family(self) -> None:
        launcher = None if self.child is None else self.child.process
        try:
            self._family.look(launcher)
        except OSError as error:
            self._say_blind(error)

    def _watch_health(self, ranks: Mapping[int, Now]) -> None:
        stepping = any(now.total_steps > 0 for now in ranks.values())
        if self.state != "running" or self._healthy_said or not stepping:
            return
        if self.clock.monotonic() - self._launched_at >= self.order.config.restart.healthy_s:
            self._healthy_said = True
            self.policy.healthy()

    def _watch_drops(self) -> None:
        due = self.clock.monotonic() - self._drops_said_at >= DROPS_EVERY_S
        if due or not self.relay.stuck:
            self.say_drops()

    def say_drops(self) -> None:
        """Report what was dropped since the last report, if anything."""
        dropped = self.relay.dropped_bytes - self._dropped_said
        if dropped > 0:
            self._dropped_said += dropped
            self._drops_said_at = self.clock.monotonic()
            self.host.finding(found("output_dropped", dropped_bytes=dropped))

    def document(self) -> dict[str, Any]:
        """The run's own part of status.json."""
        now = self.clock.monotonic()
        running = self.child is not None and self.state in ("running", "stopping", "ending")
        last = self.last_exit
        return {
            "state": self.state,
            "paused": self.paused,
            "run_id": self.order.run_id,
            "pid": os.getpid(),
            "miner_pid": self.child.pid if self.child is not None else None,
            "command": list(self.order.command),
            "attempt": max(self.launches - 1, 0),
            "restarts": self.policy.failures,
            "started": iso_utc(self.clock.wall() - (now - self._launched_at)) if running else None,
            "last_exit": None if last is None else {
                "code": last.code, "signal": last.signal, "asked": last.asked, "finished": last.finished,
                "runtime_s": round(last.runtime_s, 3),
            },
            "rank_processes": {
                str(rank): {"pid": identity.pid, "local_rank": identity.local_rank}
                for rank, identity in self.flights.identities().items()
            },
            "output_dropped_bytes": self.relay.dropped_bytes,
        }  # fmt: skip


def _asked(wish: Wish | None) -> str:
    return "without being asked" if wish is None else f"as asked: {wish.cause}"
