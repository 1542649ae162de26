"""Tracks the tracebacks that each rank prints, up to the exception that ends them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

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

_IN_TRACEBACK = re.compile(r"(?:[A-Za-z_]\w*\.)+(?P<name>[A-Z]\w*)(?::\s|$)")
"""An exception whose name does not mark it as one, such as `queue.Empty`."""

_FRAME = re.compile(
    r'file "([^"]+)", line \d|^file ([^\s:]{1,300}\.py|.:[^\s:]{1,300}\.py):\d+, in '
)
"""Stack frame lines of Python and IPython."""

_PLAIN_FRAME = re.compile(rb'  File "([^"]{1,1000})", line \d+, in \S+\r?$')

_STARTS = "traceback (most recent call last)"
_IGNORED = "exception ignored in"

MAX_STREAMS = 256
"""Ranks whose lines are told apart."""

_MAX_LINES = 2000
"""A traceback still open after this many lines was truncated."""

_MAX_FRAMES = 8192
"""Characters kept of the paths in one traceback."""


class LogLine(NamedTuple):
    """A cleaned line of a log."""

    rank: int | None
    number: int
    text: str
    lowered: str


class Ended(NamedTuple):
    """An exception, with the paths of the traceback that it ends; empty without one."""

    name: str
    frames: str


class CutOff(NamedTuple):
    """A traceback that the log breaks off in."""

    rank: int | None
    line: int
    raises: str
    """The last source line with a `raise`."""


@dataclass
class _Traceback:
    line: int
    ignored: bool = False
    """Python reports that it continues: the exception was raised in a destructor or at shutdown."""

    frames: str = ""
    raises: str = ""

    def passes(self, path: str) -> None:
        """Add the lower-cased path of a frame."""
        if len(self.frames) < _MAX_FRAMES:
            self.frames += path.replace("\\", "/") + " "


class Tracebacks:
    """The open traceback of each rank; a log may begin in the middle of one."""

    def __init__(self) -> None:
        self._open: dict[int | None, _Traceback] = {}

    def is_open(self, rank: int | None) -> bool:
        """Whether this rank prints a traceback."""
        return rank in self._open

    def follow(self, line: LogLine) -> bool:
        """Take a line. True for one that only gives a file position or quotes source: the error
        itself comes at the end."""
        lowered = line.lowered
        inner = lowered.lstrip()
        starts = _STARTS in lowered
        quoted = inner.startswith("file ") or 'file "' in lowered
        frame = _FRAME.search(lowered) if quoted else None
        opened = self._open.get(line.rank)
        ignored = _IGNORED in lowered or (opened is not None and opened.ignored and starts)
        # A warning may quote a frame; one that begins a line belongs to a traceback.
        positions = frame is not None and inner.startswith("file ")
        if starts or ignored or (positions and opened is None):
            opened = self._begin(line.rank, line.number, ignored=ignored)
        if frame and opened is not None:
            opened.passes(frame[1] or frame[2])
        if opened is not None and inner.startswith("raise "):
            opened.raises = line.text.strip()
            return True
        return positions

    def frame(self, raw: bytes, number: int) -> bool:
        """Take a line as the interpreter writes it, without a prefix; False if it is not part of a
        frame.

        Most lines of a log full of errors are: this is `follow` for them, several times as fast.
        """
        opened = self._open.get(None)
        if opened is not None and raw.startswith(b"    raise "):
            opened.raises = raw.strip().decode("utf-8", "replace")
            return True
        frame = _PLAIN_FRAME.match(raw)
        if frame is None:
            return False
        opened = opened or self._begin(None, number)
        if opened is not None:
            opened.passes(frame[1].decode("utf-8", "replace").lower())
        return True

    def _begin(self, rank: int | None, number: int, *, ignored: bool = False) -> _Traceback | None:
        if rank not in self._open and len(self._open) >= MAX_STREAMS:
            return None
        self._open[rank] = begun = _Traceback(number, ignored)
        return begun

    def ignores(self, line: LogLine) -> bool:
        """Whether the line belongs to an exception that Python ignores."""
        opened = self._open.get(line.rank)
        return opened is not None and opened.ignored and line.number - opened.line < _MAX_LINES

    def ends(self, line: LogLine) -> Ended | None:
        """The exception that ends a traceback on this line, or that the line names without one."""
        opened = self._open.get(line.rank)
        inside = opened is not None and 0 <= line.number - opened.line < _MAX_LINES
        kinds = (EXCEPTION, _QUALIFIED, _IN_TRACEBACK) if inside else (EXCEPTION, _QUALIFIED)
        found = (kind.match(line.text, 0, _MAX_NAME) for kind in kinds)
        match = next((one for one in found if one), None)
        if match is None:
            return None
        self._open.pop(line.rank, None)
        if opened is not None and inside:
            return None if opened.ignored else Ended(match["name"], opened.frames)
        return Ended(match["name"], "")

    def cut_off(self, number: int) -> CutOff | None:
        """The latest traceback still open at line `number`, where the log ends."""
        cut = [
            CutOff(rank, opened.line, opened.raises)
            for rank, opened in self._open.items()
            if number - opened.line < _MAX_LINES and not opened.ignored
        ]
        return max(cut, key=lambda c: c.line, default=None)
