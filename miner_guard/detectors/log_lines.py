"""Steps and pushes parsed from log lines, for a miner without the hook. Pure: the caller passes
arrival times.

A line reports that a step ended (or, with micro-batches, its progress). Its duration is the one in
the line, else the time since the previous line, shared by the steps between them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_EVALUATION = re.compile(r"\b(?:eval\w*|val|valid\w*|test)[\s:|\])-]*$", re.IGNORECASE)
"""Precedes a step's line whose loss is an evaluation's (torchtitan's `validate step: 10 loss:
…`)."""

_MAX_LINE_LENGTH = 2000
_REMEMBERED = 16
"""Steps remembered to recognise a repeated line (another rank, a second handler)."""


@dataclass(frozen=True)
class Patterns:
    """Compiled patterns, in the order of trial. attach/patterns.toml explains the groups."""

    step: tuple[re.Pattern[str], ...]
    push: tuple[re.Pattern[str], ...] = ()
    push_failed: tuple[re.Pattern[str], ...] = ()
    phase: tuple[re.Pattern[str], ...] = ()
    peers: tuple[re.Pattern[str], ...] = ()
    allreduce_finished: tuple[re.Pattern[str], ...] = ()
    allreduce_failed: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def of(cls, *tables: Mapping[str, Iterable[str]]) -> Patterns:
        """Compile tables of texts; the first table takes precedence. Raises re.error for an invalid
        pattern."""
        kinds = {
            kind: tuple(re.compile(p) for t in tables for p in t.get(kind, ()))
            for kind in cls.__match_args__
        }
        return cls(**kinds)


@dataclass(frozen=True)
class StepLine:
    """The step that one line reports. Fields the line lacks are None."""

    outer: int | None
    inner: int
    loss: float | None
    lr: float | None
    grad_norm: float | None
    seconds: float | None
    gpu_gb: float | None
    partial: bool
    """The line reports micro-batches; the step ends when the next one begins."""


@dataclass(frozen=True)
class PushLine:
    """The miner reports a push, or a failed one."""

    tag: str | None
    error: str | None


@dataclass(frozen=True)
class PhaseLine:
    """The miner enters a phase, or reports how long one took."""

    phase: str
    """A phase outside of plain training, until the next line of a step or phase; empty: training
    again."""

    seconds: float | None = None
    """The phase is over and took so long."""

    outer: int | None = None
    """The outer step of the steps that follow."""


@dataclass(frozen=True)
class PeersLine:
    """The program reports how many peers take part, itself included."""

    peers: int


@dataclass(frozen=True)
class AllReduceEnd:
    """The program reports how an AllReduce ended."""

    error: str | None
    """None if it succeeded."""


@dataclass(frozen=True)
class LoggedStep:
    """A step as far as the log shows it. Monotonic seconds."""

    line: StepLine
    start: float
    end: float


def read(line: str, patterns: Patterns) -> StepLine | PushLine | PhaseLine | None:
    """The parsed line; None for another subject or another rank."""
    text = _plain(line)
    for pattern in patterns.step:
        if (match := pattern.search(text)) is not None:
            return None if _EVALUATION.search(text, 0, match.start()) else _step(match.groupdict())
    if (push := read_push(text, patterns)) is not None:
        return push
    return _phase(text, patterns)


def read_swarm(line: str, patterns: Patterns) -> PeersLine | AllReduceEnd | None:
    """What a line reports of the other peers: their number, or the end of an AllReduce."""
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
    if inner is None or (groups.get("rank") or "0").lstrip("0"):
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


class LogSteps:
    """Assembles steps from the lines of one launch. O(1) memory."""

    def __init__(self, started: float) -> None:
        """`started`: launch time of the miner, monotonic seconds."""
        self._since = started
        self._pending: StepLine | None = None
        self._seen: deque[tuple[int | None, int]] = deque(maxlen=_REMEMBERED)
        self._last: StepLine | None = None

    def observe(self, line: StepLine, now: float) -> Iterator[LoggedStep]:
        """The steps that ended with this line, which arrived at `now`."""
        key = (line.outer, line.inner)
        if line.partial:
            yield from self._observe_partial(line, now)
            return
        if key in self._seen:
            return
        self._seen.append(key)
        yield self._ended(line, now)

    def _observe_partial(self, line: StepLine, now: float) -> Iterator[LoggedStep]:
        pending = self._pending
        if pending is not None and (pending.outer, pending.inner) != (line.outer, line.inner):
            yield self._ended(pending, now)
        self._pending = line

    def _ended(self, line: StepLine, now: float) -> LoggedStep:
        last, self._last = self._last, line
        jump = line.inner - last.inner if last is not None and last.outer == line.outer else 1
        seconds = line.seconds if line.seconds is not None else (now - self._since) / max(jump, 1)
        self._since = now
        return LoggedStep(replace(line, seconds=seconds), now - seconds, now)
