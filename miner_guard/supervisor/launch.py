"""One launch while it lasts: the child process, what was asked of it, and how far its end has
come."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from miner_guard.monitors.base import Exit
from miner_guard.supervisor.launch_spec import StopRequest, Then
from miner_guard.supervisor.process.child import Child
from miner_guard.supervisor.process.process_tree import ProcessTree
from miner_guard.supervisor.process.teardown import Teardown
from miner_guard.system.clock import Clock

RETRY_INSPECT_S = 1.0
"""Until processes that could not be inspected are inspected again."""


@dataclass
class ActiveLaunch:
    """For the supervisor's thread. What it does may be repeated: each call continues where the last
    one stopped."""

    child: Child
    attempt: int
    started: float
    """Monotonic."""

    clock: Clock
    family: ProcessTree
    """Knows which processes belong to this launch."""

    wish: StopRequest | None = None
    """Why the guard ends it; None while nobody asked."""

    teardown: Teardown | None = None
    healthy: bool = False
    """It ran long enough for earlier failures to be forgotten."""

    drain_until: float | None = None
    """Until when its last output is shown to the monitors; None before its processes are gone."""

    _next_step: float = field(default=0.0)

    def gone(self) -> bool:
        """Whether the launcher has ended; reaps it."""
        return self.child.code() is not None

    def ask_to_end(self, grace_s: float) -> None:
        """SIGTERM to the launcher with the next `step`, SIGKILL to whatever is left after the
        grace."""
        self.teardown = self.new_teardown(grace_s)
        self.teardown.ask()
        self._next_step = 0.0

    def launcher_ended(self) -> None:
        """The launcher is reaped: end what it left behind, beginning with the next `step`."""
        if self.teardown is None:
            self.teardown = self.new_teardown(0.0)
        self.teardown.ended()
        self._next_step = 0.0

    def new_teardown(self, grace_s: float) -> Teardown:
        """What ends this launch; not begun."""
        launcher = self.child.process
        return Teardown(
            self.clock,
            lambda: self.family.leftovers(launcher),
            launcher,
            grace_s,
            self.family.kill_all,
        )

    def step(self) -> float | None:
        """Do what is due of the teardown. Seconds until the next step, None when nothing is left or
        can be done.

        Raises OSError where processes can't be inspected; the next step is due after
        `RETRY_INSPECT_S` then.
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
        """How it ended. `said_finished`: its ranks or the settings say that its work is done."""
        code = self.child.code()
        if code is None:
            # It waits in the kernel and will never be reaped: SIGKILL was all that could be done.
            code = 128 + signal.SIGKILL
        asked = self.wish is not None
        by_itself = code == 0 and not asked
        finished = said_finished and (by_itself or self.asked_to(Then.FINISH))
        return Exit(code, self.child.signal, asked, finished, self.clock.monotonic() - self.started)

    def asked_to(self, then: Then) -> bool:
        """Whether this is what the guard ends it for."""
        return self.wish is not None and self.wish.then is then
