"""One active launch: the child process, the stop request, and the progress of its teardown."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from miner_guard.guard.child import Child
from miner_guard.guard.process_tree import ProcessTree
from miner_guard.guard.states import StopRequest, Then
from miner_guard.guard.teardown import Teardown
from miner_guard.system.clock import Clock
from miner_guard.watch.base import Exit

RETRY_INSPECT_S = 1.0
"""Seconds before retrying a failed process inspection."""


@dataclass
class ActiveLaunch:
    """One active launch. Supervisor thread only. Methods may be called again: each call continues
    where the last one stopped."""

    child: Child
    attempt: int
    started: float
    """Monotonic seconds."""

    clock: Clock
    process_tree: ProcessTree
    """Finds the processes of this launch."""

    stop_request: StopRequest | None = None
    """The request that ends this launch; None if nobody has requested a stop."""

    teardown: Teardown | None = None
    healthy: bool = False
    """The launch ran long enough to reset the failure count."""

    drain_until: float | None = None
    """Deadline for the monitors to read the last output; None until all processes of the launch are
    gone."""

    _next_step: float = field(default=0.0)

    def gone(self) -> bool:
        """Return True if the launcher has ended, and reap it."""
        return self.child.code() is not None

    def ask_to_end(self, grace_s: float) -> None:
        """Make the next `step` send SIGTERM to the launcher; processes that remain after `grace_s`
        get SIGKILL."""
        self.teardown = self.new_teardown(grace_s)
        self.teardown.ask()
        self._next_step = 0.0

    def launcher_ended(self) -> None:
        """The launcher has been reaped: kill the processes it left behind, starting at the next
        `step`."""
        if self.teardown is None:
            self.teardown = self.new_teardown(0.0)
        self.teardown.ended()
        self._next_step = 0.0

    def new_teardown(self, grace_s: float) -> Teardown:
        """A teardown for this launch, not yet started."""
        launcher = self.child.process
        return Teardown(
            self.clock,
            lambda: self.process_tree.leftovers(launcher),
            launcher,
            grace_s,
            self.process_tree.kill_all,
        )

    def step(self) -> float | None:
        """Advance the teardown. Returns seconds until the next step, or None when every process
        is gone or can't be killed.

        Raises OSError if processes can't be inspected; the next step is then due after
        `RETRY_INSPECT_S`.
        """
        assert self.teardown is not None
        now = self.clock.monotonic()
        if now < self._next_step:
            return self._next_step - now
        self._next_step = now + RETRY_INSPECT_S
        again = self.teardown.step()
        self._next_step = now if again is None else now + again
        return again

    def exit(self, said_finished: bool) -> Exit:
        """Return how the launch ended. `said_finished`: the ranks reported that the work is done,
        or the settings imply it."""
        code = self.child.code()
        if code is None:
            # The launcher is stuck in the kernel and can't be reaped; SIGKILL was the last resort.
            code = 128 + signal.SIGKILL
        asked = self.stop_request is not None
        by_itself = code == 0 and not asked
        finished = said_finished and (by_itself or self.asked_to(Then.FINISH))
        return Exit(code, self.child.signal, asked, finished, self.clock.monotonic() - self.started)

    def asked_to(self, then: Then) -> bool:
        """Return True if the guard is ending this launch and `then` follows."""
        return self.stop_request is not None and self.stop_request.then is then
