"""Verdict: is the miner earning, since when, why not, and what to do; one line per change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from miner_guard.detectors.verdict import RunVerdict, judge
from miner_guard.detectors.verdict_conditions import UNKNOWN
from miner_guard.detectors.verdict_history import VerdictWeek
from miner_guard.detectors.verdict_memory import Memory
from miner_guard.detectors.verdict_wording import headline
from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.eventlog.section import LastRead
from miner_guard.eventlog.status_document import StatusDocument, VerdictStatus, read_status
from miner_guard.monitors.base import Context, Monitor
from miner_guard.rank.layout import Now, StepRecord
from miner_guard.system.clock import iso_utc

_SETTLED_S = 5.0
"""A condition must hold this long before the verdict changes: shorter conditions are reported by
other events."""

_UNWATCHED_S = 600.0
"""If two ticks are further apart than this (the host was suspended), the time in between
counts as unwatched."""

_REPORTED = ("state", "since", "cause", "next_step", "confidence", "earns")


class VerdictMonitor(Monitor):
    """Judges the status document at each tick and reports changes in the verdict."""

    name = "verdict"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._memory = Memory()
        self._document = LastRead(StatusDocument)
        self._current: RunVerdict | None = None
        self._since = context.clock.wall()
        self._candidate: tuple[str, float] | None = None
        """A condition that may become the verdict, and the monotonic time when it began."""

        before = read_status(context.state)
        verdict = before.verdict if before is not None else None
        self._week = VerdictWeek(*((verdict.week, verdict.week_start) if verdict else ({},)))
        self._counted_at = context.clock.monotonic()

    def on_finding(self, finding: Finding) -> Iterable[Finding]:
        self._memory.take(finding)
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Finding]:
        self._memory.stepped(steps[-1].loss)
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Finding]:
        self._count(now)
        status = self.context.status()
        if not status:
            return ()
        verdict = judge(self._document.of(status), self._memory)
        if self._current is not None and verdict.key == self._current.key:
            # Update the numbers in the sentence; only a different condition counts as a change.
            self._current, self._candidate = verdict, None
            return ()
        if self._candidate is None or self._candidate[0] != verdict.key:
            self._candidate = (verdict.key, now)
        held_s = now - self._candidate[1]
        if held_s < _SETTLED_S:
            return ()
        return [self._change(verdict, held_s)]

    def on_stop(self) -> Iterable[Finding]:
        """The final verdict: nothing is training here anymore."""
        self._count(self.context.clock.monotonic())
        verdict = judge(
            replace(StatusDocument.from_json(self.context.status()), state="done"), self._memory
        )
        return [self._change(verdict)]

    def _count(self, now: float) -> None:
        """Add the time since the last call to the week's totals."""
        passed_s, self._counted_at = now - self._counted_at, now
        if passed_s <= _UNWATCHED_S:
            wall, state = self.context.clock.wall(), UNKNOWN
            if self._current is not None:
                state = self._current.state
            self._week.add(state, wall - passed_s, wall)

    def _change(self, verdict: RunVerdict, held_s: float = 0.0) -> Finding:
        """Adopt a verdict whose condition has held for `held_s` seconds. A hang counts from
        the last step before it."""
        previous = self._current
        self._current, self._candidate = verdict, None
        if previous is None or previous.state != verdict.state:
            wall = self.context.clock.wall()
            self._since = wall - held_s - self._memory.silent_s
            before = UNKNOWN if previous is None else previous.state
            self._week.correct(before, verdict.state, self._since, wall)
        shown = self._status()
        return make_finding(
            "verdict_changed",
            headline=headline(shown),
            previous=None if previous is None else previous.state,
            **{name: getattr(shown, name) for name in _REPORTED},
        )

    def _status(self) -> VerdictStatus:
        if self._current is None:
            status = VerdictStatus(
                state=UNKNOWN, cause="the guard has just started", earns="unknown"
            )
        else:
            status = self._current.status(iso_utc(self._since))
        return replace(status, week=self._week.to_json(), week_start=self._week.start)

    def snapshot(self) -> Mapping[str, Any]:
        return self._status().to_json()
