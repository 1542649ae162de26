"""Reads the lines of a log: rank, text, and what stands in it that concerns a traceback.

Ranks, restarts and loops print the same lines with other numbers, so what lines of one shape (the
bytes with every digit replaced by 0) have in common is determined once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from typing import NamedTuple

from miner_guard.incidents.log_text import CONTROL, clean, without_colours

EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(?P<name>[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Fault|Failure|Timeout|Violation)"
    r"|[A-Z]\w{0,80}(?:Error|Exception)\w{0,80})(?::\s|\s*$|:$|\()"
)
"""An exception at the beginning of a line."""

_QUALIFIED = re.compile(r"(?:\w+\.)+(?:exc|exceptions?|errors?)\.(?P<name>[A-Z]\w*)(?::\s|\s*$)")
"""An exception whose module marks it as one, such as `torch._dynamo.exc.Unsupported`."""

_MAX_NAME = 400
"""Longest exception name accepted: without a limit the search time is quadratic in the line's
length."""

_IN_TRACEBACK = re.compile(
    r"(?:(?:[A-Za-z_]\w*\.)+(?P<dotted>[A-Z]\w*|(?:gai|h)?error)"
    r"|(?P<bare>Exception|Error|[A-Z]\w{1,80}(?:Warning|Expired|Found|Invalid|Refused|Denied|Closed"
    r"|Unavailable|Exceeded|Failed|Mismatch|Corrupt|Corrupted|Unsupported|Abort|Aborted|Cancelled"
    r"|Empty|Full|Missing)))(?::\s|$)"
)
"""An exception whose name does not mark it as one, such as `queue.Empty` or `socket.gaierror`, or
that has no other name than `Exception`."""

BEGINS = "traceback (most recent call last)"
IGNORED = "exception ignored in"
CHAINED = ("exception was the direct cause of", "handling of the above exception")

INCIDENT = "incident "
LAUNCH = "miner started"
"""The guard's own lines hold one of these."""

REMARKABLE = (BEGINS, IGNORED, *CHAINED, INCIDENT, LAUNCH, 'file "')
"""A line without any of these, that begins like none of a traceback, only has its message."""

_IN_A_TRACEBACK = ("file ", "raise ", "\u2502", "/", "~/", "./")
_REMARKABLE_WORDS = frozenset(word.encode() for word in REMARKABLE)

WITHOUT_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
"""Replaces each digit by 0, so that texts that differ only in their numbers become one."""

_A_RANK_OR_NONE = (b"000: ", b"000:\t")
"""Three digits are a rank that srun prints or not: it depends on the first one. Such lines have no
shape in common."""

_MAX_SHAPES = 512
_MAX_SHAPE_LENGTH = 400

_Span = tuple[int, int]


class LineShape(NamedTuple):
    """What a line's text has in common with those that differ from it only in digits."""

    ordinary: bool
    """Not part of a traceback or of a chain of exceptions, and not printed by the guard."""

    exception: _Span | None
    """Where the name of an exception stands, if the line begins with one."""

    within: _Span | None
    """The same at the end of a traceback, where any name counts."""


class LogLine(NamedTuple):
    """A cleaned line of a log."""

    rank: int | None
    number: int
    text: str
    lowered: str
    shape: LineShape
    raw: bytes = b""
    """The line with its prefix, which may name its level."""

    def exception(self, within: bool) -> str | None:
        """The name of the exception that the line begins with; `within` a traceback?"""
        span = self.shape.within if within else self.shape.exception
        return None if span is None else self.text[span[0] : span[1]]


class LineReader:
    """Reads lines, and remembers the shapes of recent ones. Uses bounded memory."""

    def __init__(self, words: Callable[[str], Set[bytes]]) -> None:
        """`words`: the words of a lower-cased text, REMARKABLE among them; for a long line one
        search for all is cheaper than one for each."""
        self._words = words
        self._shapes: dict[bytes, LineShape] = {}
        """By a line's bytes with each digit replaced by 0."""

        self._places: dict[bytes, slice] = {}
        """For lines without a rank or colours that came twice, where their text stands."""

    def read(self, raw: bytes, number: int) -> LogLine:
        """Line `number`."""
        if len(raw) > _MAX_SHAPE_LENGTH:
            rank, text = clean(raw)
            lowered = text.lower()
            remarkable = not _REMARKABLE_WORDS.isdisjoint(self._words(lowered))
            return LogLine(rank, number, text, lowered, _shape(text, lowered, remarkable), raw)
        masked = raw.translate(WITHOUT_DIGITS)
        place = self._places.get(masked)
        if place is not None:
            text = raw[place].decode()
            return LogLine(None, number, text, text.lower(), self._shapes[masked], raw)
        rank, text = clean(raw)
        shape = self._shapes.get(masked)
        if shape is None:
            line = log_line(rank, number, text)._replace(raw=raw)
            self._learn(masked, line.shape)
            return line
        stripped = raw.rstrip()
        same = rank is None and raw.isascii() and without_colours(raw) == raw
        if same and stripped.endswith(text.encode()):
            self._places[masked] = slice(len(stripped) - len(text), len(stripped))
        return LogLine(rank, number, text, text.lower(), shape, raw)

    def _learn(self, masked: bytes, shape: LineShape) -> None:
        shown = without_colours(masked).translate(None, CONTROL)
        if any(words in shown for words in _A_RANK_OR_NONE):
            return
        if len(self._shapes) >= _MAX_SHAPES:
            self._shapes.clear()
            self._places.clear()
        self._shapes[masked] = shape


def log_line(rank: int | None, number: int, text: str) -> LogLine:
    """The line with this text."""
    lowered = text.lower()
    remarkable = any(words in lowered for words in REMARKABLE)
    return LogLine(rank, number, text, lowered, _shape(text, lowered, remarkable))


def _last_line(text: str) -> _Span | None:
    match = _IN_TRACEBACK.match(text, 0, _MAX_NAME)
    return None if match is None else match.span("bare" if match["dotted"] is None else "dotted")


def _shape(text: str, lowered: str, remarkable: bool) -> LineShape:
    exception = _named(EXCEPTION, text) or _named(_QUALIFIED, text)
    positioned = text.startswith("    ") or lowered.lstrip().startswith(_IN_A_TRACEBACK)
    return LineShape(not (remarkable or positioned), exception, exception or _last_line(text))


def _named(kind: re.Pattern[str], text: str) -> _Span | None:
    match = kind.match(text, 0, _MAX_NAME)
    return None if match is None else match.span("name")
