"""Log-only mode: parses steps from the miner's lines and writes them into a flight record as the
hook would, so that every other monitor sees them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from miner_guard.attach.patterns import patterns
from miner_guard.detectors.log_lines import (
    LoggedStep,
    LogSteps,
    Patterns,
    PhaseLine,
    PushLine,
    read,
)
from miner_guard.detectors.step_grammar import StepLine
from miner_guard.detectors.trace.reading import evaluation_in
from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.monitors.base import Context, Exit, Launch, Monitor
from miner_guard.rank import layout
from miner_guard.rank.flight import FlightWriter
from miner_guard.rank.journal import UploadEntry
from miner_guard.rank.layout import NAN, Now, StepRecord

_NUMBERED = {"step", "inner"}
"""A pattern needs one of these groups to produce a step."""

STARTING, RUNNING, CLOSED, *_ = layout.STATES


_SN38_WORDS = frozenset({b"inner step", b"index:", b"reduce", b"pausing", b"push", b"upload"})

_UNHOOKED_S = 3.0
"""How long a miner may print steps without any rank reporting; a hook reports within a second."""


class LogAttachMonitor(Monitor):
    """Reads the miner's lines if `[miner] attach` is `log`. With `sn38`, does so only for a miner
    that lacks the methods to hook (subnet 38's before 2025-02): it prints steps, but no rank
    reports."""

    name = "log_only"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        attach = context.config.miner.attach
        self._active = attach == "log"
        self._standby = attach == "sn38"
        """Whether to take over once the miner turns out to have nothing to hook."""

        self.words = None if self._active else _SN38_WORDS if self._standby else frozenset()
        self._launch: Launch | None = None
        self._ranks: Mapping[int, Now] = {}
        self._flight: FlightWriter | None = None
        self._findings: list[Finding] = []
        self._blind = ""
        """Why there is no flight record. Reported once while launches keep failing the same way."""
        self._patterns = self._load() if self._active or self._standby else Patterns(())
        self._begin(0.0)

    def _begin(self, started: float) -> None:
        self._steps = LogSteps(started)
        self._written = 0
        self._unhooked_since: float | None = None
        """When the miner first printed a step that no rank reported."""

        self._line_at: float | None = None
        self._phase, self._phase_at = "", started
        """The phase that the last line reported (empty during plain training) and when it began."""

        self._spent: dict[str, float] = {}
        """Seconds spent in phases that have ended since the last step, by phase."""

        self._outer: int | None = None
        """The outer step, if the miner reports it on a separate line."""

        self._longest_gap = 0.0
        self._last: LoggedStep | None = None
        self._evaluated: float | None = None
        """Evaluation printed since the last step; goes into the next step's record."""

    def _load(self) -> Patterns:
        usable: list[str] = []
        for text in self.context.config.miner.log_patterns:
            try:
                groups = re.compile(text).groupindex
                wrong = None if _NUMBERED & set(groups) else "has no group named `step` or `inner`"
            except re.error as error:
                wrong = f"is not a regular expression: {error}"
            if wrong is None:
                usable.append(text)
            else:
                what = f"[miner] log_patterns: {text!r} {wrong}; ignoring this pattern"
                self._findings.append(make_finding("guard_degraded", what=what))
        return patterns(self.context.config.miner.profile, usable)

    def on_launch(self, launch: Launch) -> Iterable[Finding]:
        self._launch, self._ranks = launch, {}
        self._begin(launch.started)
        return self._open(launch) if self._active else ()

    def _open(self, launch: Launch) -> list[Finding]:
        """Create the flight record for the steps that the lines report."""
        findings, self._findings = self._findings, []
        try:
            self._flight = FlightWriter(
                self.context.state.flight_of(0),
                rank=0,
                local_rank=0,
                world_size=1,
                run_id=self.context.run_id,
                pid=launch.pid,
            )
        except OSError as error:
            self._flight = None
            what = (
                f"--attach log: no flight record: {error.strerror or error}; steps are not recorded"
            )
            if what != self._blind:
                findings.append(make_finding("guard_degraded", what=what))
            self._blind = what
            return findings
        self._blind = ""
        self._show(self._flight, STARTING, launch.started)
        return findings

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Finding]:
        self._ranks = ranks
        return ()

    def _take_over(self, launch: Launch, lines: Sequence[bytes], now: float) -> list[Finding]:
        """Start reading the lines if the miner has been printing steps that no rank reports."""
        prints = any(isinstance(read(_text(raw), self._patterns), StepLine) for raw in lines)
        if not prints or self._ranks:
            return []
        if self._unhooked_since is None:
            self._unhooked_since = now
        if now - self._unhooked_since < _UNHOOKED_S:
            return []
        detail = (
            "like versions before 2025-02, this miner lacks the methods that --attach sn38 hooks, "
            "so its steps are read from the log, and its uploads are not gated"
        )
        return [make_finding("log_attached", detail=detail), *self._open(launch)]

    def reads_lines(self) -> bool:
        return self._flight is not None or (self._standby and not self._ranks)

    def on_lines(self, lines: Sequence[bytes]) -> Iterable[Finding]:
        findings: list[Finding] = []
        now = self.context.clock.monotonic()
        if self._standby and self._flight is None and self._launch is not None:
            findings = self._take_over(self._launch, lines, now)
        if self._flight is None:
            return findings
        for raw in lines:
            evaluated = evaluation_in(raw)
            self._evaluated = self._evaluated if evaluated is None else evaluated
            self._line(self._flight, _text(raw), now)
        return findings

    def _line(self, flight: FlightWriter, text: str, now: float) -> None:
        parsed = read(text, self._patterns)
        if isinstance(parsed, PushLine):
            flight.journal(self._upload(parsed, now).to_json())
        elif isinstance(parsed, StepLine):
            in_phase = bool(self._phase)
            outer = self._outer if parsed.outer is None else parsed.outer
            for step in self._steps.observe(replace(parsed, outer=outer), now):
                self._write(flight, step)
            if self._written:
                self._progressed(flight, now, in_phase=in_phase)
        elif isinstance(parsed, PhaseLine):
            self._outer = self._outer if parsed.outer is None else parsed.outer
            if parsed.seconds is not None:
                self._spent[parsed.phase] = self._spent.get(parsed.phase, 0.0) + parsed.seconds
            self._enter("" if parsed.seconds is not None else parsed.phase, now)
            self._show(flight, RUNNING, now)

    def _progressed(self, flight: FlightWriter, now: float, *, in_phase: bool) -> None:
        """Record the arrival of a line about a step. `in_phase`: whether the miner was in a phase
        until then, rather than just training."""
        if self._line_at is not None and not in_phase:
            self._longest_gap = max(self._longest_gap, now - self._line_at)
        self._line_at = now
        self._enter("", now)
        self._show(flight, RUNNING, now)

    def _enter(self, phase: str, now: float) -> None:
        """End the current phase and begin `phase`; does nothing if `phase` is the current one."""
        if phase == self._phase:
            return
        if self._phase:
            spent = now - self._phase_at
            self._spent[self._phase] = self._spent.get(self._phase, 0.0) + spent
        self._phase, self._phase_at = phase, now

    def _write(self, flight: FlightWriter, step: LoggedStep) -> None:
        line = step.line
        self._enter("", step.end)
        spent, self._spent = self._spent, {}
        # A line may report a step shorter than the phases since the previous step.
        phases = {name: min(s, step.end - step.start) for name, s in spent.items()}
        flags = layout.FLAG_FIRST if self._written == 0 else 0
        flags |= layout.FLAG_SYNC if phases else 0
        self._written += 1
        self._last = step
        evaluated, self._evaluated = self._evaluated, None
        flight.append(
            StepRecord(
                outer_step=line.outer,
                inner_step=line.inner,
                total_steps=self._written,
                start=step.start,
                end=step.end,
                wall=self.context.clock.wall(),
                loss=line.loss,
                lr=line.lr,
                grad_norm=line.grad_norm,
                eval_loss=evaluated,
                allocated_bytes=None if line.gpu_gb is None else line.gpu_gb * 1024**3,
                flags=flags,
                phases=phases,
            )
        )

    def _show(self, flight: FlightWriter, state: str, now: float) -> None:
        # A program that prints every hundredth step is not hanging in between. In a phase, the hang
        # limit of that phase applies instead.
        allowance = 0.0 if self._phase else self._longest_gap * self.context.config.hang.factor
        flight.show_state(state, now)
        since = self._phase_at if self._phase else now
        flight.show_phase(self._phase.encode(), since, now, allowance or NAN)

    def _upload(self, push: PushLine, now: float) -> UploadEntry:
        line = self._last.line if self._last is not None else None
        return UploadEntry(
            t=now,
            phase="finished" if push.error is None else "failed",
            outer_step=line.outer if line else self._outer,
            inner_step=line.inner if line else None,
            tag=push.tag,
            error=push.error,
        )

    def on_exit(self, end: Exit) -> Iterable[Finding]:
        self._launch = None
        if self._flight is not None:
            now = self.context.clock.monotonic()
            for step in self._steps.finish(now):
                self._write(self._flight, step)
            self._show(self._flight, CLOSED, now)
            self._flight.close()
            self._flight = None
        return ()

    def snapshot(self) -> Mapping[str, Any]:
        if not self._active and self._flight is None:
            return {"active": False}
        return {"active": True, "steps": self._written}


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
