"""Output: steps of miners that never call the hook, a first step that does not come, hooks that
could not begin, secrets in the open, and the failures that the lines report.
"""

from __future__ import annotations

import math
import os
import re
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from miner_guard import state_dir
from miner_guard.checks.health import oom_kills
from miner_guard.checks.request import value_of
from miner_guard.incidents import knowledge
from miner_guard.incidents.explain import Explained, in_words
from miner_guard.incidents.logs import excerpt
from miner_guard.incidents.oom import Training
from miner_guard.incidents.root import Evidence, Incident, Retraction, RootCauseAnalyzer, Sighting
from miner_guard.incidents.scan import Scanner
from miner_guard.rank import layout
from miner_guard.rank.journal import UploadEntry
from miner_guard.rank.layout import NAN, FlightWriter, Now, StepRecord
from miner_guard.record.events import Event, degraded, event, not_stored
from miner_guard.record.redaction import SECRET_NAME
from miner_guard.record.status_document import ClientStatus
from miner_guard.system.clock import Once, OncePer
from miner_guard.uploads.repos.credentials import beside
from miner_guard.watch.base import Context, Exit, Launch, Monitor
from miner_guard.watch.evidence import incident_folder, prune_incidents
from miner_guard.watch.hang import FACTOR
from miner_guard.watch.lines import (
    LoggedStep,
    LogSteps,
    Patterns,
    PhaseLine,
    PushLine,
    SentLine,
    StepLine,
    evaluation_in,
    lacking,
    patterns,
    quoted,
    read_line,
)
from miner_guard.watch.progress import FactsMonitor

STARTING, RUNNING, CLOSED, *_ = layout.STATES


_BATCH_S = 1.0
"""Lines of up to this time arrive together; their times are spread over it, or the steps of a fast
miner would seem to take no time."""


_RETURNED = 200
"""A queue that moves a client back by more than so many places has reset it; entries that others
add or leave change a position by less (macrocosm-os/iota, issue 194)."""

_RETURNED_S = 6 * 3600.0
_FLAPS_S = 120.0
"""IOTA's client asks again every minute."""

_DROPPED = 30
"""So many drops within an hour without an acknowledgement between them are not one slow peer (issue
195: 60 to 83 an hour, and none acknowledged)."""


class LogAttachMonitor(Monitor):
    """Reads the miner's lines if `[miner] attach` is `log`."""

    name = "log_only"
    order = 0

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._active = context.config.miner.attach == "log"
        self.words = None if self._active else frozenset()
        self._flight: FlightWriter | None = None
        self._events: list[Event] = []
        self._blind = Once()
        """Reasons for having no flight record; each is reported once."""

        self._allowances = context.config.hang.allowances
        self._returned, self._unsent = OncePer(_RETURNED_S), OncePer(_RETURNED_S)
        self._overdue = OncePer(_RETURNED_S)
        self._patterns = self._load() if self._active else ()
        self._begin(0.0)

    def _begin(self, started: float) -> None:
        self._steps = LogSteps(started)
        self._written = 0
        self._heard_at = started
        self._line_at: float | None = None
        self._phase, self._phase_at = "", started
        """The phase that the last line reported (empty during plain training) and when it began."""

        self._before, self._before_at = "", started
        """The phase before that one."""

        self._epoch_at, self._longest_epoch_s = started, 0.0
        """When the epoch began, and how long the longest one took."""

        self._spent: dict[str, float] = {}
        """Seconds spent in phases that have ended since the last step, by phase."""

        self._outer: int | None = None
        """The outer step, if the miner reports it on a separate line."""

        self._position: int | None = None
        self._returns = 0
        """How often the queue has moved the client back."""

        self._dropped: deque[float] = deque(maxlen=_DROPPED)
        """When a peer last failed to acknowledge; empty after an acknowledgement."""

        self._longest_gap = 0.0
        self._longest_phase: dict[str, float] = {}
        self._last: LoggedStep | None = None
        self._evaluated: float | None = None
        """Evaluation printed since the last step; goes into the next step's record."""

    def _load(self) -> Patterns:
        miner = self.context.config.miner
        try:
            return patterns(miner.profile, miner.log_patterns)
        except re.error as error:
            what = f"[miner] log_patterns: {error.pattern!r}: {error}; ignoring log_patterns"
            self._events.append(degraded(what))
            return patterns(miner.profile)

    def on_launch(self, launch: Launch) -> Iterable[Event]:
        self._begin(launch.started)
        return self._open(launch) if self._active else ()

    def _open(self, launch: Launch) -> list[Event]:
        """Create the flight record for the steps that the lines report."""
        events, self._events = self._events, []
        try:
            self._flight = self.context.records.open_writer(launch.pid)
        except OSError as error:
            self._flight = None
            reason = error.strerror or str(error)
            if self._blind.first(reason):
                what = f"--attach log: no flight record: {reason}; steps are not recorded"
                events.append(degraded(what))
            return events
        self._show(self._flight, STARTING, launch.started)
        return events

    def on_lines(self, lines: Sequence[bytes]) -> Iterable[Event]:
        if self._flight is None:
            return ()
        now = self.context.clock.monotonic()
        begun, self._heard_at = max(self._heard_at, now - _BATCH_S), now
        for place, raw in enumerate(lines, 1):
            at = begun + (now - begun) * place / len(lines)
            evaluated = evaluation_in(raw)
            self._evaluated = self._evaluated if evaluated is None else evaluated
            self._line(self._flight, raw.decode("utf-8", "replace"), at)
        events, self._events = self._events, []
        return events

    def _line(self, flight: FlightWriter, text: str, now: float) -> None:
        parsed = read_line(text, self._patterns)
        if isinstance(parsed, PushLine):
            flight.journal(self._upload(parsed, now).to_json())
        elif isinstance(parsed, StepLine):
            in_phase = bool(self._phase)
            outer = self._outer if parsed.outer is None else parsed.outer
            self._count_epoch(outer, now)
            for step in self._steps.observe(replace(parsed, outer=outer), now):
                self._write(flight, step)
            if self._written:
                self._progressed(flight, now, in_phase=in_phase)
        elif isinstance(parsed, SentLine):
            self._sent(now, dropped=parsed.dropped)
        elif isinstance(parsed, PhaseLine):
            merged = self._phase == "allreduce" and parsed.phase != "allreduce"
            self._count_epoch(parsed.outer, now, merged=merged)
            if parsed.seconds is not None:
                self._spent[parsed.phase] = self._spent.get(parsed.phase, 0.0) + parsed.seconds
            if parsed.position is not None:
                self._queued(parsed.position, now)
            self._enter("" if parsed.seconds is not None else parsed.phase, now)
            self._show(flight, RUNNING, now)

    def _sent(self, now: float, *, dropped: bool) -> None:
        """Report peers that acknowledge nothing: the client drops its work and says healthy."""
        if not dropped:
            self._dropped.clear()
            return
        self._dropped.append(now)
        span_s = now - self._dropped[0]
        if len(self._dropped) < _DROPPED or span_s > 3600 or not self._unsent.ask(now):
            return
        reason = (
            f"no peer answered the last {_DROPPED} times, in {span_s / 60:.0f} min; check that UDP "
            "gets from this host to the internet"
        )
        self._events.append(
            event("upload_failed", "error", f"UPLOAD FAILED: {reason}", reason=reason)
        )

    def _queued(self, position: int, now: float) -> None:
        """Report a queue that moves the client back, for which a restart is no remedy."""
        last, self._position = self._position, position
        if last is None or position - last <= _RETURNED:
            return
        self._returns += 1
        if self._returned.ask(now):
            text = (
                f"NO STEP YET: the queue moved this client back from {last} to {position} "
                f"({self._returns} so far); wait: a new registration begins at its end too"
            )
            self._events.append(event("no_step_yet", "warning", text, detail=text))

    def _count_epoch(self, outer: int | None, now: float, *, merged: bool = False) -> None:
        """Begin an epoch at a new number, and when weights are `merged`; report one that does not
        end, although the client trains."""
        if merged or outer not in (None, self._outer):
            if self._outer is not None:
                self._longest_epoch_s = max(self._longest_epoch_s, now - self._epoch_at)
            self._epoch_at, self._outer = now, self._outer if outer is None else outer
        limit_s = max(self._allowances.get("epoch", math.inf), 2 * self._longest_epoch_s)
        if now - self._epoch_at <= limit_s or self._phase or not self._overdue.ask(now):
            return
        for_h, limit_h = (now - self._epoch_at) / 3600, limit_s / 3600
        text = (
            f"NO STEP YET: the epoch has not ended for {for_h:.1f} h (limit {limit_h:.1f} h), "
            "although this client trains; only the network ends it"
        )
        self._events.append(event("no_step_yet", "warning", text, detail=text))

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
            longest = self._longest_phase.get(self._phase, 0.0)
            self._longest_phase[self._phase] = max(longest, spent)
            self._spent[self._phase] = self._spent.get(self._phase, 0.0) + spent
        # A client that is kept out alternates between two states: neither ends the other.
        goes_on = phase == self._before != "" and self._phase and now - self._phase_at < _FLAPS_S
        since = self._before_at if goes_on else now
        self._before, self._before_at = self._phase, self._phase_at
        self._phase, self._phase_at = phase, since

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
            ).packed()
        )

    def _show(self, flight: FlightWriter, state: str, now: float) -> None:
        # A program that prints every hundredth step is not hanging in between. In a phase, the hang
        # limit of that phase applies instead, unless the phase has ended well after longer.
        allowance, phase = self._longest_gap * FACTOR, self._phase
        if phase:
            allowance = 2 * self._longest_phase.get(phase, 0.0)
            allowance = 0.0 if allowance <= self._allowances.get(phase, math.inf) else allowance
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

    def on_exit(self, end: Exit) -> Iterable[Event]:
        if self._flight is not None:
            now = self.context.clock.monotonic()
            for step in self._steps.finish(now):
                self._write(self._flight, step)
            self._show(self._flight, CLOSED, now)
            self._flight.close()
            self._flight = None
        return ()

    def snapshot(self) -> Mapping[str, Any]:
        if not self._active:
            return {"active": False}
        client = ClientStatus(
            phase=self._phase,
            phase_s=round(self.context.clock.monotonic() - self._phase_at),
            position=self._position,
            returns=self._returns,
        )
        return {"active": True, "steps": self._written, **client.to_json()}


_WHY_NO_STEP = {
    None: "no rank has called miner_guard.init(). Either the miner has not got that far, or it "
    "never calls the hook; in that case, start it with --attach sn38, auto or log",
    "sn38": "--attach sn38 found nothing to hook in this miner; try --attach auto or log",
    "auto": (
        "--attach auto found no torch training loop in this miner; try --attach log, or "
        "call the hook"
    ),
    "log": (
        "none of the miner's lines was recognized as a step; describe the step lines in [miner] "
        "log_patterns"
    ),
}
"""Why a live miner shows no steps, and what to do, by attach mode."""

_PERSISTS_S = 60.0
"""How long the miner may print step-like lines before a rank must report a step. A working hook
reports within seconds."""

_MAX_LINES = 2_000
"""Maximum number of lines to parse per launch: parsing one with the grammar takes as long as
relaying hundreds."""

FIRST_STEP_NOTICE_S = 90.0
"""After this long without a step, the guard reports that it has seen none, and quotes the line that
most resembles a step."""


class FirstStepMonitor(Monitor):
    """Watches each launch until its first step, a hang or a stop."""

    name = "first_step"
    order = 1
    words = frozenset({b"step", b"iter", b"loss", b"epoch", b"batch", b"it/s", b"s/it"})

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._begin(None)

    def _begin(self, launch: Launch | None) -> None:
        """Reset the state for a new launch."""
        self._launch = launch
        """None if no launch is running, or after a step, a hang or a stop."""

        self._lines = 0
        self._step = self._nearest = ""
        """The first line that is a step, and before it the one that resembles a step, quoted."""

        self._nearest_at = 0.0
        """When the first such line arrived."""

        self._noticed = self._warned = False
        self.words = frozenset() if launch is None else type(self).words

    @cached_property
    def _patterns(self) -> Patterns:
        # Compiled only when a line could be a step: most miners report steps through the hook.
        return patterns(self.context.config.miner.profile)

    def on_launch(self, launch: Launch) -> Iterable[Event]:
        self._begin(launch)
        return ()

    def on_exit(self, end: Exit) -> Iterable[Event]:
        launch, noticed = self._launch, self._noticed
        waited_s = 0.0 if launch is None else self.context.clock.monotonic() - launch.started
        why, line = self._why(), self._line
        self._begin(None)
        if launch is None or noticed or end.code != 0 or end.asked:
            return ()
        # A short program learns it before it is gone.
        text = f"NO STEP YET when the miner ended after {waited_s:.0f}s: {why}"
        return (self._no_step(text, waited_s, why, line),)

    def _no_step(
        self, text: str, waited_s: float, detail: str, line: str, *, warns: bool = False
    ) -> Event:
        return event(
            "no_step_yet",
            "warning" if warns else "info",
            text,
            waited_s=round(waited_s, 1),
            detail=detail,
            nearest=line or None,
        )

    @property
    def _line(self) -> str:
        """The line that is most like a step, quoted, or an empty string."""
        return self._step or self._nearest

    def _why(self) -> str:
        nearest = f"; the nearest line is {self._line}" if self._line else ""
        return f"{_WHY_NO_STEP[self.context.config.miner.attach]}{nearest}"

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Event]:
        self._begin(None)
        return ()

    def on_event(self, event: Event) -> Iterable[Event]:
        if event.name in ("hang_detected", "miner_stopping"):
            self._begin(None)
        return ()

    def on_lines(self, lines: Sequence[bytes]) -> Iterable[Event]:
        for raw in lines:
            if self._launch is None or self._step or self._lines >= _MAX_LINES:
                self.words = frozenset()
                break
            self._lines += 1
            text = raw.decode("utf-8", "replace")
            parsed = read_line(text, self._patterns)
            is_step = isinstance(parsed, StepLine) and parsed.loss is not None
            lacks = "" if is_step or parsed is not None else lacking(text)
            if not (self._step or self._nearest) and (is_step or lacks):
                self._nearest_at = self.context.clock.monotonic()
            if is_step:
                self._step = repr(quoted(text))
            elif lacks:
                self._nearest = self._nearest or f"{quoted(text)!r}: {lacks}"
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        if self._launch is None:
            return ()
        hang, waited = self.context.config.hang, now - self._launch.started
        hooked = bool(ranks) and self.context.config.miner.attach != "log"
        # Before this, leave it to the hang monitor to report a miner that hangs.
        blind = waited > hang.first_step_s + _PERSISTS_S
        if blind and not self._warned and not hooked:
            self._warned = True
            what = f"no step seen for {waited / 60:.0f} min, "
            what += f"so the guard cannot see slow steps or hangs either: {self._why()}"
            return [degraded(what)]
        persists = bool(self._nearest_at) and now - self._nearest_at > _PERSISTS_S
        if waited <= FIRST_STEP_NOTICE_S or self._warned or (self._noticed and not persists):
            return ()
        self._noticed, self._warned = True, persists
        detail = self._detail(ranks)
        text = f"NO STEP YET: {waited:.0f}s after the launch; {detail}"
        return [self._no_step(text, waited, detail, self._line, warns=persists)]

    def _detail(self, ranks: Mapping[int, Now]) -> str:
        attach, line = self.context.config.miner.attach, self._line
        if self._step and attach != "log":
            told = f"the miner prints steps, such as {line}, but no rank reports any"
            return f"{told}: {_WHY_NO_STEP[attach]}"
        if line:
            described = "describe the step lines in [miner] log_patterns, and check with"
            advice = f"; {described} `miner-guard explain --steps FILE`" if attach == "log" else ""
            return f"the nearest line is {line}{advice}"
        if ranks and attach != "log":
            header = ranks[min(ranks)]
            place = header.operation or header.phase or "no named phase"
            return f"rank {min(ranks)} is in {place}"
        return "none of the miner's lines looks like a step either; the miner may still be loading"

    def snapshot(self) -> Mapping[str, Any]:
        return {"waiting": self._launch is not None}


_DEGRADED_LINE = re.compile(rb"^(?:\[[^\]]*\]:? ?)?GUARD DEGRADED: (.{1,500})")
"""The line of `miner_guard.InertGuard` and of the sitecustomize, after torchrun's prefix if it has
one."""

_MAX_DEGRADED = 20


class DegradedHooksMonitor(Monitor):
    """Reports each different line once."""

    name = "degraded_hooks"
    words = frozenset({b"degraded"})

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._reported = Once(_MAX_DEGRADED)

    def on_lines(self, lines: Sequence[bytes]) -> Iterator[Event]:
        for line in lines:
            match = _DEGRADED_LINE.match(line)
            if match is None:
                continue
            what = match[1].decode("utf-8", "replace").strip()
            if self._reported.first(what):
                yield degraded(what, source="log")


_COMMITMENT = b"Commitment - ["
_MIN_LENGTH = 12
"""Shorter values of secret variables would match ordinary words."""

_NEXT_STEP = (
    "turn off the miner's debug logging, delete the log files that contain them, and replace the "
    "keys"
)


class SecretLeaksMonitor(Monitor):
    """Searches the miner's output for secrets from the environment and its `.env`, and for subnet
    38's commitment."""

    name = "exposed"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # Of a value of several lines, such as a key, the longest line is enough.
        self._values = {
            line.encode(): f"the value of {name}"
            for name, value in beside(os.environ, context.config.repo).items()
            if SECRET_NAME.search(name)
            and len(line := max(value.splitlines(), key=len, default="")) >= _MIN_LENGTH
            and not value.startswith("/")
        }
        self._values[_COMMITMENT] = "a commitment that contains read credentials"
        self.words = frozenset(map(bytes.lower, self._values))
        self._kinds = Once()

    def on_lines(self, lines: Sequence[bytes]) -> Iterable[Event]:
        shown = [kind for value, kind in self._values.items() if any(value in x for x in lines)]
        return [
            event(
                "secret_exposed",
                "warning",
                f"SECRET EXPOSED: the miner's output shows {kind}; {_NEXT_STEP}",
                where="the miner's output",
                kind=kind,
                next_step=_NEXT_STEP,
            )
            for kind in shown
            if self._kinds.first(kind)
        ]

    def snapshot(self) -> Mapping[str, Any]:
        return {"shown": sorted(map(str, self._kinds))}


SETTLE_S = 2.0
"""After this long without new matches the cascade is complete and its root cause can be
reported."""

MAX_WAIT_S = 10.0
"""Report the root cause after at most this long, even if lines keep arriving."""

CAUSELESS_S = 30.0
"""Wait this long while only symptoms, or reports without a reason, have arrived: the launcher
reports how the lost rank ended only after stopping the others (torchrun gives them 30 s)."""

_REPLACED_S = 600.0
"""The same for a launcher that may replace the ranks: until it has, or exits. torchrun waits this
long for nodes to join."""

EPISODE_S = 600.0
"""A match this long after the previous one starts a new incident, unless it is a symptom."""

SYMPTOMS_S = 3600.0
"""A symptom within this time of a reported root belongs to it: ranks notice a lost peer only after
their collective's timeout."""

COOLDOWN_S = 900.0
"""Minimum time between reports of the same label within one launch."""

REMARKS = 3
"""A retried failure counts as an incident after this many occurrences, or when the miner exits."""

_CAUSELESS = ("summary", "symptom", "warning")
_NEVER_OVERCOME = frozenset({"rank_gone"})
"""Guard events that finite losses do not clear: a lost rank never steps again."""

_TAIL_BYTES = 64 * 1024
_EXCERPT_LENGTH = 120
"""How many characters of the matched line to include in the incident's line."""


class IncidentsMonitor(FactsMonitor):
    """Feeds the output to a scanner and reports the root causes."""

    name = "incidents"

    def __init__(
        self, context: Context, count_oom_kills: Callable[[], int | None] = oom_kills
    ) -> None:
        super().__init__(context)
        self._count_oom_kills = count_oom_kills
        self._knowledge = knowledge.load()
        self._counts: Counter[str] = Counter()
        self._latest: Explained | None = None
        self._printed = self._prepared = False
        self._causeless_s = CAUSELESS_S
        self._begin()

    def _begin(self) -> None:
        self._scanner, self._case = Scanner(self._knowledge), RootCauseAnalyzer(self._knowledge)
        self._tail = b""
        """The end of the output, for the incident's folder."""

        self._first_s: float | None = None
        self._last_s = self._named_s = float("-inf")
        self._reported_at: dict[str, float] = {}
        self._events: set[str] = set()
        self._shown: dict[str, Sighting] = {}
        """Sightings by label, for causes that one of the guard's own events has established."""

        self._finite: dict[int, bool] = {}
        """Whether each rank's last loss was finite."""

        self._root: Explained | None = None
        self._stopping = False
        self._oom_kills = self._count_oom_kills()

    def on_launch(self, launch: Launch) -> Iterable[Event]:
        replaces = value_of(launch.command, "--max-restarts") not in (None, "0")
        self._causeless_s = _REPLACED_S if replaces else CAUSELESS_S
        self._begin()
        return ()

    def on_output(self, chunk: bytes) -> Iterable[Event]:
        self._printed = True
        self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
        evidence = self._scanner.feed(chunk)
        if evidence:
            now = self.context.clock.monotonic()
            self._take(evidence, now)
            self._first_s = now if self._first_s is None else self._first_s
        return self._overcome(evidence)

    def _prepare(self) -> None:
        """Load the error patterns. Runs in a job thread."""
        self._knowledge.prepare()

    def _overcome(self, evidence: Iterable[Evidence]) -> list[Event]:
        """Events for reported incidents that training has since recovered from."""
        past = {
            label
            for item in evidence
            if isinstance(item, Retraction) and item.within is None and item.needed
            for label in item.labels
        }
        passed = sorted(past & self._reported_at.keys())
        for label in passed:
            del self._reported_at[label]
        return [
            event("incident", "info", f"OVERCOME {label}: training continued after it", label=label)
            for label in passed
        ]

    def _take(self, evidence: list[Evidence], now: float) -> None:
        """Add the matches to the case; after a long quiet period, start a new case first."""
        if self._first_s is None and now - self._last_s > EPISODE_S:
            self._case = RootCauseAnalyzer(self._knowledge)
        self._last_s = now
        self._case.add(evidence)

    def on_event(self, event: Event) -> Iterable[Event]:
        self._events.add(event.name)
        # The guard's line counts as evidence, so that this monitor and a scan of the whole log name
        # the same root.
        for label in self._knowledge.shown_by(event.name):
            sighting = Sighting(label, "cause", self._scanner.line, event.text, event.rank)
            self._take([sighting], self.context.clock.monotonic())
            if event.name not in _NEVER_OVERCOME:
                self._shown[label] = sighting
        if event.name == "miner_stopping":
            self._stopping = True
        return self._replaced(event) if event.name == "ranks_restarted" else ()

    def _replaced(self, event: Event) -> list[Event]:
        """What ended the ranks before these. Ranks that only lost a peer, because its node left,
        have no cause of their own."""
        self._case.add([*self._scanner.finish(), *self._passed()])
        root = self._current_root()
        left = event.level == "info" and root is not None and root.first.role in _CAUSELESS
        named = [] if left else [*self._name(self.context.clock.monotonic(), min_count=1)]
        self._begin()
        return named

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Event]:
        loss = steps[-1].loss
        if loss is not None:
            self._finite[rank] = math.isfinite(loss)
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        if self._printed and not self._prepared:
            # Load the patterns before the first traceback, and in a job, because this thread would
            # delay the output. Wait for the first output, because loading would slow down a burst.
            self._prepared = True
            self.context.jobs.once("incident knowledge", self._prepare)
        if self._first_s is None or (
            now - self._last_s < SETTLE_S and now - self._first_s < MAX_WAIT_S
        ):
            return ()
        root = self._current_root()
        if (
            root is not None
            and root.first.role in _CAUSELESS
            and now - self._first_s < self._causeless_s
        ):
            return ()
        return self._name(now, REMARKS)

    def objection(self) -> str | None:
        if self.context.clock.monotonic() - self._last_s > EPISODE_S:
            return None
        root = self._current_root()
        return None if root is None or root.first.role in ("retry", "warning") else root.label

    def on_exit(self, end: Exit) -> Iterable[Event]:
        now = self.context.clock.monotonic()
        self._case.add([*self._scanner.finish(), *self._passed()])
        if end.signal == signal.SIGKILL and not end.asked and self._current_root() is None:
            # The output does not mention the signal: without a launcher, no process reports it.
            line = "MINER EXITED: signal SIGKILL"
            self._take([Sighting("host_oom_kill", "exit", self._scanner.line, line, None)], now)
        lasting = self._lasting()
        self._case.add(lasting)
        if lasting or now - self._last_s <= EPISODE_S:
            # Report why the miner ended even if the guard has reported what led to it.
            self._events.clear()
        return () if end.asked or end.finished else self._name(now, min_count=1)

    def _passed(self) -> list[Evidence]:
        """Causes that the guard reported and training then recovered from, such as a non-finite
        loss."""
        well = [
            label
            for label, sighting in self._shown.items()
            if (
                any(self._finite.values())
                if sighting.rank is None
                else self._finite.get(sighting.rank, False)
            )
        ]
        return [Retraction(tuple(well), self._scanner.line, None, ("cause",))] if well else []

    def _lasting(self) -> list[Evidence]:
        """Earlier causes that still hold according to the guard's own measurements. For example, a
        model with NaN weights fails in ways that no pattern covers."""
        root = self._current_root()
        if root is not None and root.label not in ("code_bug", *self._shown):
            return []
        return [
            sighting
            for sighting in self._shown.values()
            if not (
                all(self._finite.values())
                if sighting.rank is None
                else self._finite.get(sighting.rank, True)
            )
        ]

    def _current_root(self) -> Incident | None:
        return next((i for i in self._case.incidents(self._scanner.line) if i.root), None)

    def _by_the_kernels_count(self, root: Incident) -> Incident:
        """Attribute a SIGKILL to the OOM killer only if the kernel counted an OOM kill; a line that
        names the OOM killer needs no count."""
        if root.label != "host_oom_kill" or root.first.role != "exit":
            return root
        if (self._count_oom_kills() or 0) > (self._oom_kills or 0):
            return root
        name = "process_killed"
        first = root.first._replace(label=name, cause="", fix="", restart="")
        return replace(root, label=name, first=first, sightings=())

    def _global_ranks(self, ranks: Sequence[int]) -> list[int]:
        """torchrun names the first rank to fail by its local rank: on a second node, that is no
        rank of this node."""
        here = self.context.records.identities()
        by_local_rank = {one.local_rank: rank for rank, one in here.items()}
        return sorted({r if r in here else by_local_rank.get(r, r) for r in ranks})

    def _name(self, now: float, min_count: int) -> Iterable[Event]:
        """Report the root cause, unless it has already been reported or is only a retry or warning
        seen fewer than `min_count` times."""
        self._first_s = None
        root = self._current_root()
        if root is not None:
            root = replace(self._by_the_kernels_count(root), ranks=self._global_ranks(root.ranks))
        if self._stopping or root is None or self._is_reported(root, now):
            return ()
        if root.first.role in ("retry", "warning") and root.count < min_count:
            return ()
        facts = self.facts
        training = Training(facts.batch_size, facts.effective_batch_size, facts.world_size)
        self._root = self._latest = explained = in_words(
            root, self._knowledge, training, self.context.redactor.public
        )
        self._reported_at[root.label] = self._named_s = now
        self._counts[root.label] += 1
        return [self._event(explained, root)]

    def _is_reported(self, root: Incident, now: float) -> bool:
        label = self._knowledge.labels[root.label]
        at = self._reported_at.get(root.label)
        if at is not None and now - at < COOLDOWN_S:
            return True
        if (
            root.first.role in ("symptom", "exit")
            and self._root is not None
            and now - self._named_s < SYMPTOMS_S
        ):
            return True
        return not self._events.isdisjoint(label.events)

    def _event(self, explained: Explained, root: Incident) -> Event:
        folder = incident_folder(self.context.state, self.context.clock.wall(), explained.label)
        story = {**explained.as_dict(), "count": explained.count, "ranks": list(explained.ranks)}
        output = self._tail
        if len(output) == _TAIL_BYTES:
            # Redaction would miss a key that is cut in half.
            output = output.partition(b"\n")[2] or output
        self.context.jobs.once("incident evidence", lambda: self._store(folder, story, output))
        cause = f"{explained.cause} Seen: {excerpt(explained.excerpt, _EXCERPT_LENGTH)}"
        return event(
            "incident",
            "warning" if root.first.role in ("retry", "warning") else explained.severity,
            f"INCIDENT {explained.label}: {cause} Fix: {explained.fixes[0]}",
            rank=explained.ranks[0] if len(explained.ranks) == 1 else None,
            label=explained.label,
            cause=cause,
            fix=explained.fixes[0],
            fixes=list(explained.fixes),
            excerpt=explained.excerpt,
            restart=explained.restart,
            ranks=list(explained.ranks),
            evidence=str(folder),
        )

    def _store(self, folder: Any, story: Mapping[str, Any], output: bytes) -> None:
        """Write the evidence folder. Runs in a job thread."""
        try:
            state_dir.write_json(
                folder / "incident.json", {**story, "status": dict(self.context.status())}
            )
            state_dir.write_atomic(
                folder / "output.log", self.context.redactor.text(output.decode("utf-8", "replace"))
            )
            prune_incidents(self.context.state)
        except OSError as error:
            self.context.emit(not_stored(f"evidence of {story['label']}", error))

    def snapshot(self) -> Mapping[str, Any]:
        latest = self._latest
        return {
            "root_cause": None if self._root is None else self._root.label,
            "latest": None if latest is None else {**latest.as_dict(), "restart": latest.restart},
            "counts": dict(self._counts),
        }
