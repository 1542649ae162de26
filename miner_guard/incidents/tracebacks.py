"""Tracks each rank's tracebacks up to the exception that ends them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from miner_guard.incidents.frame_runs import (
    MAX_TEXT,
    FrameRun,
    frame_runs,
    last_raise,
    quoted_source,
)
from miner_guard.incidents.log_lines import BEGINS, IGNORED, LogLine

_FRAME = re.compile(
    r'file "([^"]+)", line \d|^file ([^\s:]{1,300}\.py|.:[^\s:]{1,300}\.py):\d+, in '
)
"""Stack frame lines from Python and IPython."""

_OTHER_FRAME = re.compile(
    r"(?:\u2502 ?)?((?:[~/.]|[a-z]:\\)[^\s:]{1,300}\.py)(?::\d{1,9})? in ([^\s(]{0,100})"
)
"""Stack frame lines from rich and older IPython."""

_OTHER_SOURCE = re.compile(r"\u2502 {0,8}\u2771 {0,8}\d{1,9} [\u2502 ]{0,100}(.{1,200})")
"""The source line that rich marks as the failing one."""

MAX_STREAMS = 256
"""Maximum number of ranks whose lines are tracked separately."""

_MAX_LINES = 2000
"""A traceback still open after this many lines was truncated."""

_MAX_FRAMES = 8192
"""Maximum number of characters to keep of one traceback's paths."""


class Ended(NamedTuple):
    """An exception with the paths in its traceback; without a traceback, `frames` is empty."""

    name: str
    frames: str
    text: bytes = b""
    """The last frames, with function names and quoted source lines."""


class CutOff(NamedTuple):
    """A traceback cut off by the end of the log."""

    rank: int | None
    line: int
    raises: str
    """The last source line that contains a `raise`."""

    text: bytes
    """See Ended."""


@dataclass
class _Traceback:
    line: int
    ignored: bool = False
    """Python reports that it ignored an exception raised in a destructor or at shutdown."""

    frames: str = ""
    raises: str = ""
    text: bytes = b""
    end: int = 0
    """Line number right after its latest frames."""

    def shows(self, lines: bytes) -> None:
        """Add frame or source lines."""
        self.text = (self.text + lines)[-MAX_TEXT:] if self.text else lines

    def passes(self, path: str) -> None:
        """Add a frame's lower-cased path, or several paths separated by spaces."""
        if len(self.frames) < _MAX_FRAMES:
            forward = path.replace("\\", "/")
            self.frames = f"{self.frames}{forward} "[:_MAX_FRAMES]


class Tracebacks:
    """The open traceback of each rank; a log may begin in the middle of one."""

    def __init__(self) -> None:
        self._open: dict[int | None, _Traceback] = {}
        self._quoting: bytes | None = None
        """Prefix of the frame that ended the last block. The next block may begin with that
        frame's source.
        """

    def is_open(self, rank: int | None) -> bool:
        """Whether this rank is in the middle of printing a traceback."""
        return rank in self._open

    def follow(self, line: LogLine) -> bool:
        """Process a line that is not ordinary. Returns True if it only gives a file position or
        quotes source; the error itself comes at the end of the traceback."""
        lowered = line.lowered
        inner = lowered.lstrip()
        if not inner.startswith("file ") and self._other(line, inner):
            return True
        starts = BEGINS in lowered
        quoted = inner.startswith("file ") or 'file "' in lowered
        frame = _FRAME.search(lowered) if quoted else None
        opened = self._open.get(line.rank)
        ignored = any(words in lowered for words in IGNORED) or (
            opened is not None and opened.ignored and starts
        )
        # A warning may quote a frame, but a frame at the start of a line is part of a traceback.
        positions = frame is not None and inner.startswith("file ")
        if starts or ignored or (positions and opened is None):
            opened = self._begin(line.rank, line.number, ignored=ignored)
        if frame and opened is not None:
            opened.passes(frame[1] or frame[2])
            opened.shows(line.text.encode(errors="replace") + b"\n")
        if opened is not None and inner.startswith("raise "):
            opened.raises = line.text.strip()
            opened.shows(line.text.encode(errors="replace") + b"\n")
            return True
        # When several ranks print at once, a quoted source line may not follow its frame.
        within = opened is not None and opened.frames
        quoted = line.text.startswith("    ") and not line.text[4:5].isspace()
        if opened is not None and within and quoted and not positions:
            opened.shows(line.text.encode(errors="replace") + b"\n")
        return positions or bool(within and quoted)

    def _other(self, line: LogLine, inner: str) -> bool:
        """Process a traceback line printed by rich or older IPython."""
        opened = self._open.get(line.rank)
        if opened is None:
            return False
        if frame := _OTHER_FRAME.match(inner):
            opened.passes(frame[1])
            opened.shows(f'  File "{frame[1]}", line 0, in {frame[2]}\n'.encode())
        elif source := _OTHER_SOURCE.match(inner):
            quoted = source[1].strip(" \u2502")
            opened.shows(f"    {quoted}\n".encode())
        else:
            return False
        return True

    @property
    def quoting(self) -> bool:
        """Whether the next block may begin with a frame's quoted source."""
        return self._quoting is not None

    def runs(self, block: bytes) -> list[FrameRun]:
        """The frames in a block of lines. A block may begin with the source line that belongs
        to the last frame of the previous block."""
        quoting, self._quoting = self._quoting, None
        runs = frame_runs(block)
        if quoting is not None and (rest := quoted_source(block, quoting)):
            lines, raises = block.count(b"\n", 0, rest), last_raise(block[:rest], quoting)
            text = block[:rest][-MAX_TEXT:]
            runs = [FrameRun(0, lines, quoting, False, b"", raises, text), *runs]
        if runs and block.endswith(b"\n") and runs[-1].end == block.count(b"\n"):
            self._quoting = runs[-1].prefix
        return runs

    def take(self, run: FrameRun, number: int) -> None:
        """Add frames to their rank's traceback. `number` is the line number of the first one."""
        rank = _rank(run.prefix) if run.prefix else None
        opened = self._open.get(rank)
        if run.starts or opened is None:
            ignored = opened is not None and opened.ignored
            opened = self._begin(rank, number, ignored=ignored)
        if opened is not None:
            opened.end = number + run.end - run.first
            opened.shows(run.text.replace(run.prefix, b"") if run.prefix else run.text)
            if run.paths:
                opened.passes(run.paths.decode("utf-8", "replace").lower()[:_MAX_FRAMES])
            if run.raises:
                opened.raises = run.raises.strip().decode("utf-8", "replace")

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
        """The exception on this line, with its traceback if it ends one."""
        if line.shape.within is None:
            return None
        # If only the message names a rank, the lines of its traceback name none.
        rank = None if line.rank not in self._open and "[rank" in line.lowered else line.rank
        if rank is None and rank not in self._open:
            # The thread that forwards the log may have lost the prefix of the last line.
            rank = next((r for r, t in self._open.items() if t.end == line.number), None)
        opened = self._open.get(rank)
        inside = opened is not None and 0 <= line.number - opened.line < _MAX_LINES
        name = line.exception(inside)
        if name is None:
            return None
        self._open.pop(rank, None)
        if opened is not None and inside:
            return None if opened.ignored else Ended(name, opened.frames, opened.text)
        return Ended(name, "")

    def cut_off(self, number: int) -> CutOff | None:
        """The latest traceback still open at line `number`, where the log ends."""
        cut = [
            CutOff(rank, opened.line, opened.raises, opened.text)
            for rank, opened in self._open.items()
            if number - opened.line < _MAX_LINES and not opened.ignored
        ]
        return max(cut, key=lambda c: c.line, default=None)


def _rank(prefix: bytes) -> int:
    return int(prefix.strip(b"[defaultrank]: "))
