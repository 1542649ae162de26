"""Tracks the tracebacks that each rank prints, up to the exception that ends them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
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

_IN_TRACEBACK = re.compile(r"(?:[A-Za-z_]\w*\.)+(?P<name>[A-Z]\w*|(?:gai|h)?error)(?::\s|$)")
"""An exception whose name does not mark it as one, such as `queue.Empty` or `socket.gaierror`."""

_FRAME = re.compile(
    r'file "([^"]+)", line \d|^file ([^\s:]{1,300}\.py|.:[^\s:]{1,300}\.py):\d+, in '
)
"""Stack frame lines of Python and IPython."""

_PREFIX = rb"(?:\[rank\d{1,5}\]: |\[default\d{1,5}\]:)?"
"""The prefixes of torch and of torchrun --tee."""

_SOURCE = rb" {4}(?:[^\s][^\n]*|[ ~^]*\r?)\n"
"""Python strips the source that it quotes, and indents it by four; below it may be markers."""

_AT = rb'  File "[^"\n]{1,1000}", line \d+, in [^\n]+\n'
_RUN = re.compile(
    rb"^(?P<prefix>" + _PREFIX + rb")"
    rb"(?P<start>Traceback \(most recent call last\):\r?\n(?P=prefix))?" + _AT + rb""
    rb"(?:(?P=prefix)(?:" + _SOURCE + rb"|" + _AT + rb"))*",
    re.MULTILINE,
)
"""Consecutive frames of one rank, with the source lines that they quote."""

_QUOTED = re.compile(_SOURCE)

_PATHS = re.compile(rb"^" + _PREFIX + rb'  File "([^"\n]+)"', re.MULTILINE)
_FRAME_BEGINS = b'  File "'
_RAISES = b"    raise "

BEGINS = "traceback (most recent call last)"
IGNORED = "exception ignored in"
CHAINED = ("exception was the direct cause of", "handling of the above exception")

MAX_STREAMS = 256
"""Maximum number of ranks whose lines are tracked separately."""

_MAX_LINES = 2000
"""A traceback still open after this many lines was truncated."""

_MAX_KEPT = 16_384
_MAX_FRAMES = 8192
"""Characters kept of the paths in one traceback."""


class LogLine(NamedTuple):
    """A cleaned line of a log."""

    rank: int | None
    number: int
    text: str
    lowered: str


class Ended(NamedTuple):
    """An exception, with the paths of the traceback that it ends; `frames` is empty if there is no
    traceback."""

    name: str
    frames: str


class Frames(NamedTuple):
    """Consecutive frames in a block of lines, with the source that they quote."""

    first: int
    """Number of the first line in the block."""

    end: int
    """Number of the line after the last one."""

    rank: int | None
    starts: bool
    """Begins with `Traceback (most recent call last):`."""

    paths: str
    """Lower-cased, with a blank between them."""

    raises: str
    """The last source line with a `raise`."""


class CutOff(NamedTuple):
    """A traceback cut off by the end of the log."""

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
        """Add the lower-cased path of a frame, or several with a blank between them."""
        if len(self.frames) < _MAX_FRAMES:
            forward = path.replace("\\", "/")
            self.frames = f"{self.frames}{forward} "[:_MAX_FRAMES]


class Tracebacks:
    """The open traceback of each rank; a log may begin in the middle of one."""

    def __init__(self) -> None:
        self._open: dict[int | None, _Traceback] = {}
        self._quoting: bytes | None = None
        """Prefix of the frame in which the last block ended: the next block may begin with that
        frame's source.
        """

    def is_open(self, rank: int | None) -> bool:
        """Whether this rank is in the middle of printing a traceback."""
        return rank in self._open

    def follow(self, line: LogLine) -> bool:
        """Follow a line. Returns True if it only gives a file position or quotes source: the error
        itself comes at the end."""
        lowered = line.lowered
        inner = lowered.lstrip()
        starts = BEGINS in lowered
        quoted = inner.startswith("file ") or 'file "' in lowered
        frame = _FRAME.search(lowered) if quoted else None
        opened = self._open.get(line.rank)
        ignored = IGNORED in lowered or (opened is not None and opened.ignored and starts)
        # A warning may quote a frame; one that begins a line belongs to a traceback.
        positions = frame is not None and inner.startswith("file ")
        if starts or ignored or (positions and opened is None):
            opened = self._begin(line.rank, line.number, ignored=ignored)
        if frame and opened is not None:
            opened.passes(frame[1] or frame[2])
        if opened is not None and inner.startswith("raise "):
            opened.raises = line.text.strip()
            return True
        # Between the lines of several ranks, the source that a frame quotes stands by itself.
        within = opened is not None and opened.frames
        quoted = line.text.startswith("    ") and not line.text[4:5].isspace()
        return positions or bool(within and quoted)

    @property
    def quoting(self) -> bool:
        """Whether the next block may begin with the source that a frame quotes."""
        return self._quoting is not None

    def runs(self, block: bytes) -> Iterator[Frames]:
        """The frames in a block of lines, taken whole: most lines of a log full of errors are in
        one. A block may begin with the source that the last frame of the block before quotes."""
        quoting, self._quoting = self._quoting, None
        index = end = 0
        if quoting is not None and (rest := _quoted(block, quoting)):
            index, end = block.count(b"\n", 0, rest), rest
            yield Frames(0, index, _rank(quoting), False, "", _last_raise(block[:rest], quoting))
            self._quoting = quoting if rest == len(block) else None
        if _FRAME_BEGINS not in block:
            return
        for run in _RUN.finditer(block, end):
            index += block.count(b"\n", end, run.start())
            end = run.end()
            length = block.count(b"\n", run.start(), end)
            prefix, starts = run["prefix"], run["start"] is not None
            read = _read if len(run[0]) <= _MAX_KEPT else _read.__wrapped__
            paths, raises = read(run[0], prefix)
            yield Frames(index, index + length, _rank(prefix), starts, paths, raises)
            index += length
            if end == len(block):
                self._quoting = prefix

    def take(self, frames: Frames, number: int) -> None:
        """Add frames to their rank's traceback; `number` is that of their first line."""
        opened = self._open.get(frames.rank)
        if frames.starts or opened is None:
            ignored = opened is not None and opened.ignored
            opened = self._begin(frames.rank, number, ignored=ignored)
        if opened is not None:
            if frames.paths:
                opened.passes(frames.paths)
            opened.raises = frames.raises or opened.raises

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
        # The message itself may name a rank; its traceback then stands without one.
        rank = None if line.rank not in self._open and "[rank" in line.lowered else line.rank
        opened = self._open.get(rank)
        inside = opened is not None and 0 <= line.number - opened.line < _MAX_LINES
        kinds = (EXCEPTION, _QUALIFIED, _IN_TRACEBACK) if inside else (EXCEPTION, _QUALIFIED)
        found = (kind.match(line.text, 0, _MAX_NAME) for kind in kinds)
        match = next((one for one in found if one), None)
        if match is None:
            return None
        self._open.pop(rank, None)
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


@lru_cache(maxsize=128)
def _read(run: bytes, prefix: bytes) -> tuple[str, str]:
    """The paths of a run of frames, and the last source line with a `raise`. Cached, because ranks
    and restarts print the same frames."""
    paths = b" ".join(_PATHS.findall(run)).decode("utf-8", "replace").lower()
    return paths[:_MAX_FRAMES], _last_raise(run, prefix)


def _last_raise(run: bytes, prefix: bytes) -> str:
    at = run.rfind(b"\n" + prefix + _RAISES)
    if at < 0 and not run.startswith(prefix + _RAISES):
        return ""
    start = at + 1 + len(prefix)
    return run[start : run.index(b"\n", start)].strip().decode("utf-8", "replace")


def _quoted(block: bytes, prefix: bytes) -> int:
    """Length of the source lines with which the block begins, each after this prefix."""
    end = 0
    while block.startswith(prefix, end) and (line := _QUOTED.match(block, end + len(prefix))):
        end = line.end()
    return end


def _rank(prefix: bytes) -> int | None:
    digits = prefix.strip(b"[defaultrank]: ")
    return int(digits) if digits else None
