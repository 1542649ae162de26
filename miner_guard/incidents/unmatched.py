"""Classifies errors that no pattern matches, by the general layer or else by default."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from miner_guard.incidents.knowledge import Knowledge
from miner_guard.incidents.log_lines import WARNS, LogLine
from miner_guard.incidents.patterns import Pattern
from miner_guard.incidents.sightings import Sighting
from miner_guard.incidents.tracebacks import CutOff, Ended

UNKNOWN_EXCEPTION = Pattern("code_bug", "exception", (), (), None)
_LAUNCHED = Pattern("code_bug", "symptom", (), (), None)

_NOT_A_FAULT = frozenset({"SystemExit", "StopIteration", "GeneratorExit"})
_SUMMARIES = frozenset(
    {"ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "CancelledError"}
)
"""Exceptions that are raised because something else failed."""

_LAUNCHERS = _SUMMARIES | {"CalledProcessError"}

_RAISED = re.compile(r"raise (?:\w+\.)*(\w+)")
_LEVEL = re.compile(rb"\b(?:INFO|DEBUG|TRACE|NOTICE|SUCCESS|WARN(?:ING)?)\b")
_MAX_LEVEL = 120
"""A logger prints the level within this many bytes."""

_MAX_LINE = 800
_MAX_MESSAGE = 250
"""How many characters of a message to join with the line that continues it."""

_MAX_LINES = 6
_NEXT_TRACEBACK = b"Traceback (most recent call last)"
_RECORD = re.compile(r"[\w.-]{1,40}: |[\[{<(|#=*+-]|\d")
"""The beginning of a line that is a separate record."""


class _Unfinished(NamedTuple):
    """An exception that no pattern matched; its message may continue on the next lines."""

    sighting: Sighting
    ended: Ended
    line: LogLine


class UnmatchedErrors:
    """Classifies the errors in one log that no pattern matches."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        self._unfinished: _Unfinished | None = None

    @property
    def waits(self) -> bool:
        """Whether the next line may continue an exception's message."""
        return self._unfinished is not None

    def exception(self, ended: Ended, text: str) -> list[Pattern]:
        """Return the general layer's answer for an exception, or [] if it has none."""
        if ended.name in _NOT_A_FAULT or ended.name in _SUMMARIES:
            return []
        named = self._knowledge.unmatched(ended.name, text, ended.text)
        return [named] if named else []

    def default(self, name: str, text: str) -> list[Pattern]:
        """Classify as a bug in the program, or as a symptom if a launcher reports that something
        else failed."""
        if name in _NOT_A_FAULT:
            return []
        # torch.multiprocessing raises a bare Exception and prints the worker's traceback on the
        # lines after it.
        empty = text.rstrip(": ") == "Exception"
        return [_LAUNCHED if empty or name in _LAUNCHERS else UNKNOWN_EXCEPTION]

    def cut_off(self, cut: CutOff) -> Pattern | None:
        """Classify a traceback cut off by the end of the log."""
        raised = _RAISED.match(cut.raises)
        return self._knowledge.unmatched(raised[1] if raised else "", cut.raises, cut.text)

    def line(self, line: LogLine, *, traced: bool) -> list[Pattern]:
        """Classify an error line. `traced`: whether it is part of a traceback. Use this only to
        explain a whole log, because most errors that are only logged do not stop anything."""
        warns = WARNS.match(line.lowered) or _LEVEL.search(line.raw, 0, _MAX_LEVEL)
        if traced or warns or line.shape.exception is not None or len(line.text) > _MAX_LINE:
            return []
        named = self._knowledge.general.line(line.text)
        return [replace(named, role="hint")] if named else []

    def expect_more(self, sighting: Sighting, ended: Ended, line: LogLine) -> None:
        """Remember an exception that no pattern matched; later lines may continue its message."""
        self._unfinished = _Unfinished(sighting, ended, line)

    def ends_with(self, raw: bytes) -> bool:
        """Whether the message has ended: a quick check of the raw line for the common case."""
        if raw.startswith(_NEXT_TRACEBACK):
            self._unfinished = None
        return self._unfinished is None

    def go_on(self, line: LogLine) -> Sighting | None:
        """The exception whose message this line continues, if the line reveals what it is."""
        first = self._unfinished
        if first is None or line.number > first.sighting.line + _MAX_LINES:
            self._unfinished = None
            return None
        if line.rank != first.sighting.rank or _prefix(line) != _prefix(first.line):
            # Another process printed this line in between.
            return None
        if self._ends_message(line):
            self._unfinished = None
            return None
        if _RECORD.match(line.text) or self._knowledge.match(line.lowered):
            return None
        message = f"{first.line.text[:_MAX_MESSAGE]} {line.text.strip()}"
        named = self._knowledge.unmatched(first.ended.name, message, first.ended.text)
        if named is None:
            return None
        self._unfinished = None
        return first.sighting._replace(
            label=named.label,
            role=named.role,
            cause=named.cause,
            fix=named.fix,
            restart=named.restart,
            source=named.source,
            more=line.text.strip(),
        )

    @staticmethod
    def _ends_message(line: LogLine) -> bool:
        exception = line.shape.exception is not None
        return exception or not line.shape.ordinary or not line.text.strip()


def says_little(matches: Sequence[Pattern]) -> bool:
    """Whether none of the matches names a real cause: each is an unknown exception or a generic
    pattern."""
    return bool(matches) and all(
        pattern is UNKNOWN_EXCEPTION or pattern.says_little for pattern in matches
    )


def _prefix(line: LogLine) -> int:
    return len(line.raw.rstrip()) - len(line.text.encode(errors="replace"))
