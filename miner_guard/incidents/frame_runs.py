"""Finds runs of consecutive stack frames, which make up most lines of a log full of errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

_PREFIX = rb"(?:\[rank\d{1,5}\]: |\[default\d{1,5}\]:)?"
"""The prefixes that torch and torchrun --tee add."""

_SOURCE = rb" {4}(?:[^\s][^\n]*|[ ~^]*\r?)\n"
"""Python strips each quoted source line and indents it by four spaces. Markers may follow below
it."""

_AT = rb'  File "[^"\n]{1,1000}", line \d+, in [^\n]+\n'
_RUN = re.compile(
    rb"^(?P<prefix>" + _PREFIX + rb")"
    rb"(?P<start>Traceback \(most recent call last\):\r?\n(?P=prefix))?" + _AT + rb""
    rb"(?:(?P=prefix)(?:" + _SOURCE + rb"|" + _AT + rb"))*",
    re.MULTILINE,
)
"""Consecutive frames of one rank, with their quoted source lines."""

_QUOTED = re.compile(_SOURCE)

_PATHS = re.compile(rb"^" + _PREFIX + rb'  File "([^"\n]+)"', re.MULTILINE)
_FRAME_BEGINS = b'  File "'
_RAISES = b"    raise "
MAX_TEXT = 8192


class FrameRun(NamedTuple):
    """Consecutive frames in a block of lines, with their quoted source."""

    first: int
    """Index of the run's first line in the block."""

    end: int
    """Index of the line after the run."""

    prefix: bytes
    """The prefix of every line."""

    starts: bool
    """Whether the run begins with `Traceback (most recent call last):`."""

    paths: bytes
    """The frames' paths, separated by spaces."""

    raises: bytes
    """The last source line that contains a `raise`, still indented; empty if no line does."""

    text: bytes
    """The lines themselves, up to the last `MAX_TEXT` bytes."""


FindRuns = Callable[[bytes], list[tuple[int, int, bytes, bool, bytes, bytes, bytes]]]


def frame_runs_in_python(block: bytes) -> list[tuple[int, int, bytes, bool, bytes, bytes, bytes]]:
    """The fields of each `FrameRun` in a block of lines."""
    if _FRAME_BEGINS not in block:
        return []
    found = []
    index = end = 0
    for run in _RUN.finditer(block):
        index += block.count(b"\n", end, run.start())
        first, end = index, run.end()
        index += block.count(b"\n", run.start(), end)
        prefix, starts = run["prefix"], run["start"] is not None
        paths = b" ".join(_PATHS.findall(run[0]))
        raises = last_raise(run[0], prefix)
        found.append((first, index, prefix, starts, paths, raises, run[0][-MAX_TEXT:]))
    return found


_runs: FindRuns = frame_runs_in_python


def frame_runs(block: bytes) -> list[FrameRun]:
    """The frames in a block of lines, in order."""
    return [FrameRun(*run) for run in _runs(block)]


def lines_outside(
    runs: Sequence[FrameRun], templates: Sequence[bytes], wanted: Set[bytes]
) -> set[int]:
    """Indices of the lines that have a wanted template and are outside every run."""
    found: set[int] = set()
    start = 0
    for run in runs:
        found.update([i for i in range(start, run.first) if templates[i] in wanted])
        start = run.end
    found.update([i for i in range(start, len(templates)) if templates[i] in wanted])
    return found


def last_raise(lines: bytes, prefix: bytes) -> bytes:
    """The last of these source lines that raises an exception, without its prefix."""
    at = lines.rfind(b"\n" + prefix + _RAISES)
    if at < 0 and not lines.startswith(prefix + _RAISES):
        return b""
    start = at + 1 + len(prefix)
    return lines[start : lines.index(b"\n", start)]


def quoted_source(block: bytes, prefix: bytes) -> int:
    """Length of the source lines at the start of the block, all of which have this prefix."""
    end = 0
    while block.startswith(prefix, end) and (line := _QUOTED.match(block, end + len(prefix))):
        end = line.end()
    return end
