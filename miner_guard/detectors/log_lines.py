"""Parses steps and pushes from log lines, for a miner without the hook. Pure: the caller passes
arrival times.

A line reports that a step ended (or its progress: micro-batches, a progress bar). The line
may state the step's duration; if not, the time since the previous line is divided among the steps
in between.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from miner_guard.detectors.step_grammar import Grammar, Miss, StepLine

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_EVALUATION = re.compile(r"\b(?:eval\w*|val|valid\w*|test)[\s:|\])-]*$", re.IGNORECASE)
"""Matches the text before a step's fields if the loss is an evaluation loss."""

_MAX_LINE_LENGTH = 2000
_REMEMBERED = 16
"""Steps remembered to recognise a repeated line (another rank, a second handler)."""

_ROUNDED_S = 1.0
"""How much longer than its process a step may seem to last, because programs round."""

_MAX_LAG = 3
"""Maximum number of steps by which one rank's output lags behind another's."""

KINDS = ("step", "push", "push_failed", "phase", "peers", "allreduce_finished", "allreduce_failed")


@dataclass(frozen=True)
class Patterns:
    """Compiled patterns, in the order they are tried, and the grammar for step lines that none
    of them matches. attach/patterns.toml explains the groups."""

    step: tuple[re.Pattern[str], ...]
    push: tuple[re.Pattern[str], ...] = ()
    push_failed: tuple[re.Pattern[str], ...] = ()
    phase: tuple[re.Pattern[str], ...] = ()
    peers: tuple[re.Pattern[str], ...] = ()
    allreduce_finished: tuple[re.Pattern[str], ...] = ()
    allreduce_failed: tuple[re.Pattern[str], ...] = ()
    grammar: Grammar | None = None

    @classmethod
    def of(cls, *tables: Mapping[str, Iterable[str]], grammar: Grammar | None = None) -> Patterns:
        """Compile tables of expressions; the first table takes precedence. Raises re.error for an
        invalid pattern."""
        kinds = {
            kind: tuple(re.compile(p) for t in tables for p in t.get(kind, ())) for kind in KINDS
        }
        return cls(**kinds, grammar=grammar)


@dataclass(frozen=True)
class PushLine:
    """A line in which the miner reports a push or a failed push."""

    tag: str | None
    error: str | None


@dataclass(frozen=True)
class PhaseLine:
    """A line in which the miner enters a phase or reports how long one took."""

    phase: str
    """The phase, which lasts until the next step or phase line; empty for ordinary training."""

    seconds: float | None = None
    """How long the phase took; None if it has only begun."""

    outer: int | None = None
    """The outer step that the following steps belong to."""


@dataclass(frozen=True)
class PeersLine:
    """A line in which the program reports how many peers are participating, including itself."""

    peers: int


@dataclass(frozen=True)
class AllReduceEnd:
    """A line in which the program reports how an AllReduce ended."""

    error: str | None
    """None if it succeeded."""


@dataclass(frozen=True)
class LoggedStep:
    """A step as reconstructed from the log. Times are monotonic seconds."""

    line: StepLine
    """`line.seconds` is the duration that the program printed."""

    start: float
    end: float


def read(line: str, patterns: Patterns) -> StepLine | PushLine | PhaseLine | Miss | None:
    """Parse a line; None if it does not report a step, a push or a phase."""
    text = _plain(line)
    for pattern in patterns.step:
        if (match := pattern.search(text)) is not None:
            return None if _EVALUATION.search(text, 0, match.start()) else _step(match.groupdict())
    parsed = read_push(text, patterns) or _phase(text, patterns)
    if parsed is not None or patterns.grammar is None:
        return parsed
    return patterns.grammar.read(text)


def read_swarm(line: str, patterns: Patterns) -> PeersLine | AllReduceEnd | None:
    """Parse a line about the swarm: the number of peers, or the end of an AllReduce. None for any
    other line."""
    text = _plain(line)
    for pattern in patterns.peers:
        if (match := pattern.search(text)) is not None:
            peers = _whole(match.groupdict().get("peers"))
            return None if peers is None else PeersLine(peers)
    for pattern in patterns.allreduce_failed:
        if (match := pattern.search(text)) is not None:
            return AllReduceEnd(match.groupdict().get("reason") or match.group(0))
    if any(pattern.search(text) for pattern in patterns.allreduce_finished):
        return AllReduceEnd(None)
    return None


def _plain(line: str) -> str:
    return _ANSI.sub("", line[:_MAX_LINE_LENGTH])


def _phase(text: str, patterns: Patterns) -> PhaseLine | None:
    for pattern in patterns.phase:
        if (match := pattern.search(text)) is not None:
            groups = match.groupdict()
            outer, seconds = _whole(groups.pop("outer", None)), _number(groups.pop("seconds", None))
            name = next((name for name, value in groups.items() if value is not None), "")
            return PhaseLine(name, seconds, outer)
    return None


def read_push(line: str, patterns: Patterns) -> PushLine | None:
    """The push that a line reports; None for any other line."""
    text = _plain(line)
    for pattern in patterns.push:
        if (match := pattern.search(text)) is not None:
            return PushLine(match.groupdict().get("tag"), None)
    for pattern in patterns.push_failed:
        if (match := pattern.search(text)) is not None:
            return PushLine(None, match.groupdict().get("reason") or match.group(0))
    return None


def _step(groups: Mapping[str, str | None]) -> StepLine | None:
    inner = _whole(groups.get("inner") or groups.get("step"))
    if inner is None:
        return None
    ms = _number(groups.get("ms"))
    return StepLine(
        outer=_whole(groups.get("outer")),
        inner=inner,
        loss=_number(groups.get("loss")),
        lr=_number(groups.get("lr")),
        grad_norm=_number(groups.get("grad_norm")),
        seconds=_number(groups.get("seconds")) if ms is None else ms / 1000,
        gpu_gb=_number(groups.get("gpu_gb")),
        partial=groups.get("micro") is not None,
        rank=_whole(groups.get("rank")),
    )


def _whole(text: str | None) -> int | None:
    digits = "" if text is None else text.replace(",", "").replace("_", "")
    return int(digits) if digits.isdecimal() else None


def _number(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text.rstrip(".,;|"))
    except ValueError:
        return None


def _key(line: StepLine) -> tuple[int | None, ...]:
    return (line.outer, line.epoch, line.inner)


class LogSteps:
    """Assembles steps from the lines of one launch. O(1) memory."""

    def __init__(self, started: float) -> None:
        """`started`: launch time of the miner, monotonic seconds; -inf if unknown."""
        self._started = self._since = started
        self._pending: StepLine | None = None
        """The latest redraw of a progress bar, or the latest micro-batch, of a step that has not
        ended."""

        self._seen: deque[tuple[int | None, ...]] = deque(maxlen=_REMEMBERED)
        self._last: StepLine | None = None
        self._rank: int | None = None
        """The lowest rank that prints steps; the other ranks print the same steps."""

        self._unnumbered = 0
        self._numbered = False
        self._bar_total: int | None = None
        """The total of the progress bar that counts steps: the one with a loss printed next to
        it."""

        self._elapsed = _ElapsedWatch()

    def observe(self, line: StepLine, now: float) -> Iterator[LoggedStep]:
        """Yield the steps that ended with this line, which arrived at `now`."""
        if self._of_another_rank(line.rank):
            return
        if line.inner is None:
            yield from self._observe_unnumbered(line, now)
        elif line.partial:
            yield from self._observe_partial(line, line.inner, now)
        else:
            self._numbered = True
            yield from self._ended(line, line.inner, now)

    def finish(self, now: float) -> Iterator[LoggedStep]:
        """Yield the last step if no later line has shown its end. Call this once the miner has
        exited."""
        pending, self._pending = self._pending, None
        if pending is not None and pending.inner is not None and self._counts(pending):
            yield from self._ended(pending, pending.inner, now)

    def _of_another_rank(self, rank: int | None) -> bool:
        if rank is not None:
            self._rank = rank if self._rank is None else min(rank, self._rank)
        return rank is not None and rank != self._rank

    def _observe_unnumbered(self, line: StepLine, now: float) -> Iterator[LoggedStep]:
        """A loss without a step number belongs to the step that the progress bar next to it shows
        (HF Trainer), or to the next step if the program prints no numbers."""
        pending = self._pending
        if pending is not None and pending.inner is not None and pending.loss is None:
            self._bar_total, self._pending, self._numbered = pending.total, None, True
            merged = replace(line, inner=pending.inner)
            yield from self._ended(merged, pending.inner, now)
        elif not self._numbered:
            self._unnumbered += 1
            yield from self._ended(replace(line, inner=self._unnumbered), self._unnumbered, now)

    def _observe_partial(self, line: StepLine, inner: int, now: float) -> Iterator[LoggedStep]:
        pending = self._pending
        if (
            pending is not None
            and pending.inner is not None
            and _key(pending) != _key(line)
            and self._counts(pending)
        ):
            self._numbered = True
            yield from self._ended(pending, pending.inner, now)
        # A bar's rate is smoothed; the arrival times of its redraws are not.
        self._pending = line if line.total is None else replace(line, seconds=None)

    def _counts(self, pending: StepLine) -> bool:
        """Return whether a bar without a loss is known to count steps: programs show bars for other
        work too."""
        return pending.total is None or pending.loss is not None or pending.total == self._bar_total

    def _ended(self, line: StepLine, inner: int, now: float) -> Iterator[LoggedStep]:
        before = -1 if self._last is None or self._last.inner is None else self._last.inner
        if inner < before - _MAX_LAG:
            # A new epoch counts from the start again.
            self._seen.clear()
        if _key(line) in self._seen:
            return
        self._seen.append(_key(line))
        last, self._last = self._last, line
        jump = 1
        if last is not None and _key(last)[:2] == _key(line)[:2] and not line.samples:
            jump = max(inner - before, 1)
        printed = self._elapsed.step_time(line)
        if printed is not None and printed > now - self._started + _ROUNDED_S:
            # No step lasts longer than its process: the number is a date, or another quantity.
            printed = None
        seconds = (now - self._since) / jump if printed is None else printed
        self._since = now
        yield LoggedStep(replace(line, seconds=printed), now - seconds, now)


class _ElapsedWatch:
    """Distinguishes a step's time from the time since the start, in the output of trainers that
    call both `time`."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._last = 0.0
        self._growing = 0

    def step_time(self, line: StepLine) -> float | None:
        """Return the step time in the line, or None if it has none. A `time` that has grown with
        each of the last `_GROWING` lines, to `_GROWN` times the first, is not a step time."""
        if line.seconds is None or not line.maybe_elapsed:
            return line.seconds
        grows = self._first is not None and line.seconds > self._last
        self._growing = self._growing + 1 if grows else 0
        self._first = line.seconds if not grows or self._first is None else self._first
        self._last = line.seconds
        grown = self._growing >= _GROWING and line.seconds >= _GROWN * self._first
        return None if grown else line.seconds


_GROWING, _GROWN = 3, 1.5
"""Four consecutive lines, each with a longer time than the one before: random step times rarely
rise that many times in a row, let alone by half."""
