"""Reads the lines of a log: the rank, the text, and any parts of a traceback.

Ranks, restarts and loops print the same lines with different numbers, so whatever lines of the same
shape have in common is determined only once. A line's shape is its bytes with every digit replaced
by 0.
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
"""An exception recognizable by its module, such as `torch._dynamo.exc.Unsupported`."""

_MAX_NAME = 400
"""Maximum length of an exception name. Without it, search time grows with the square of the line's
length."""

_IN_TRACEBACK = re.compile(
    r"(?:(?:[A-Za-z_]\w*\.)+(?P<dotted>[A-Z]\w*|(?:gai|h)?error)"
    r"|(?P<bare>Exception|Error|[A-Z]\w{1,80}(?:Warning|Expired|Found|Invalid|Refused|Denied|Closed"
    r"|Unavailable|Exceeded|Failed|Mismatch|Corrupt|Corrupted|Unsupported|Abort|Aborted|Cancelled"
    r"|Empty|Full|Missing)))(?::\s|$)"
)
"""An exception whose name reveals little, such as `queue.Empty` or `socket.gaierror`, or a plain
`Exception`."""

BEGINS = "traceback (most recent call last)"
IGNORED = ("exception ignored in", "--- logging error ---")
"""Python only prints the traceback that follows; it does not stop the program."""

CHAINED = ("exception was the direct cause of", "handling of the above exception")

INCIDENT = "incident "
LAUNCH = "miner started"
"""Words in the guard's own lines."""

REMARKABLE = (BEGINS, *IGNORED, *CHAINED, INCIDENT, LAUNCH, 'file "')
"""A line with none of these that does not begin like a traceback line is just a message."""

_IN_A_TRACEBACK = ("file ", "raise ", "\u2502", "/", "~/", "./")
_REMARKABLE_WORDS = frozenset(word.encode() for word in REMARKABLE)

WARNS = re.compile(r"\[?w(?:\d{3,4})?[ \]]")
"""The beginning of a warning from torch or glog, in lower case."""

WITHOUT_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
"""Replaces each digit with 0, so that texts that differ only in digits become equal."""

_A_RANK_OR_NONE = (b"000: ", b"000:\t")
"""Whether three digits are a rank from srun depends on the first digit, so these lines have no
common shape."""

_MAX_SHAPES = 512
_MAX_SHAPE_LENGTH = 400

_Span = tuple[int, int]


class LineShape(NamedTuple):
    """What a line's text has in common with texts that differ from it only in digits."""

    ordinary: bool
    """Not part of a traceback or an exception chain, and not printed by the guard."""

    exception: _Span | None
    """Span of the exception name, if the line begins with one."""

    within: _Span | None
    """Span of the exception name at the end of a traceback, where any name counts."""


class LogLine(NamedTuple):
    """A cleaned line of a log."""

    rank: int | None
    number: int
    text: str
    lowered: str
    shape: LineShape
    raw: bytes = b""
    """The line with its prefix, which may contain its log level."""

    def exception(self, within: bool) -> str | None:
        """The exception name that begins the line. `within`: whether it is in a traceback."""
        span = self.shape.within if within else self.shape.exception
        return None if span is None else self.text[span[0] : span[1]]


class LineReader:
    """Reads lines and caches the shapes of recent ones, in bounded memory."""

    def __init__(self, words: Callable[[str], Set[bytes]]) -> None:
        """`words` finds all known words in a lower-cased text, including REMARKABLE. In a long
        line, one search for all of them is cheaper than one for each."""
        self._words = words
        self._shapes: dict[bytes, LineShape] = {}
        """Keyed by a line's bytes with each digit replaced by 0."""

        self._places: dict[bytes, slice] = {}
        """Where the text is in a line, for lines that have appeared twice and have neither a rank
        nor colours."""

    def read(self, raw: bytes, number: int) -> LogLine:
        """Read line `number`."""
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
    """Build a line from its text."""
    lowered = text.lower()
    remarkable = any(words in lowered for words in REMARKABLE)
    return LogLine(rank, number, text, lowered, _shape(text, lowered, remarkable))


def _last_line(text: str) -> _Span | None:
    match = _IN_TRACEBACK.match(text, 0, _MAX_NAME)
    return None if match is None else match.span("bare" if match["dotted"] is None else "dotted")


def _shape(text: str, lowered: str, remarkable: bool) -> LineShape:
    if remarkable and lowered.rstrip().endswith(f": {BEGINS}:"):
        # The exception's message is another process's traceback, which ends in the error itself.
        return LineShape(False, None, None)
    exception = _named(EXCEPTION, text) or _named(_QUALIFIED, text)
    positioned = text.startswith("    ") or lowered.lstrip().startswith(_IN_A_TRACEBACK)
    return LineShape(not (remarkable or positioned), exception, exception or _last_line(text))


def _named(kind: re.Pattern[str], text: str) -> _Span | None:
    match = kind.match(text, 0, _MAX_NAME)
    return None if match is None else match.span("name")
