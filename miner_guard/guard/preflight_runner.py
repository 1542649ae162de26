"""Runs the preflight in a separate thread while the supervisor's thread handles signals and
requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from miner_guard.checks.preflight import PreflightRequest
from miner_guard.eventlog.catalog import Finding
from miner_guard.exits import UNAVAILABLE
from miner_guard.record.events import degraded
from miner_guard.system import probe

if TYPE_CHECKING:
    from miner_guard.guard.preflight import Outcome


class PreflightRunner:
    """Runs one preflight before the first launch. `start` returns immediately; the result reaches
    the supervisor's thread through `soon`."""

    def __init__(
        self,
        question: PreflightRequest,
        emit: Callable[[Finding], None],
        soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """`emit` and `soon` must be callable from any thread; `soon` runs the call that it is given
        on the supervisor's thread."""
        self._question, self._emit, self._soon = question, emit, soon
        self._stop = threading.Event()
        self._then: tuple[Callable[[], None], Callable[[int, str], None]] | None = None

    def start(self) -> None:
        """Start the preflight while the supervisor prepares the launch."""
        if self._question.config.gpu.preflight:
            threading.Thread(target=self._look, name="preflight", daemon=True).start()

    def begin(self, launch: Callable[[], None], refuse: Callable[[int, str], None]) -> None:
        """After the preflight, call `launch()` or `refuse(exit code, reason)` on the supervisor's
        thread.

        Call this before that thread runs the calls passed to `soon`.
        """
        if self._question.config.gpu.preflight:
            self._then = (launch, refuse)
        else:
            launch()

    def cancel(self) -> None:
        """Stop waiting, and kill the probes because they could delay the guard's exit. The runner
        launches nothing after this."""
        self._stop.set()
        probe.end_all()

    def _look(self) -> None:
        try:
            # Import late: a guard without a preflight does not need these modules.
            from miner_guard.guard.preflight import preflight

            outcome = preflight(self._question, self._emit, self._stop.wait)
        except Exception as error:  # noqa: BLE001 - a bug in the preflight must not keep the miner from starting; the error is reported
            what = (
                f"the preflight failed: {type(error).__name__}: {error}; starting the miner "
                "without it"
            )
            self._emit(degraded(what))
            outcome = None
        self._soon(lambda: self._decide(outcome))

    def _decide(self, outcome: Outcome | None) -> None:
        if self._stop.is_set() or self._then is None:
            return
        launch, refuse = self._then
        if outcome is None or outcome.go:
            launch()
            return
        critical = [c for c in outcome.checks if c.level == "critical"]
        rest = f" and {len(critical) - 1} more" if len(critical) > 1 else ""
        refuse(UNAVAILABLE, f"preflight: {critical[0].check}: {critical[0].seen}{rest}")
