"""Which part is shown which output: cut at line ends where that is possible, and only what may
concern it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from miner_guard.eventlog.line_templates import LineChunk, TemplateFilter
from miner_guard.monitors.base import Monitor

_MORE_TO_COME = 4096
"""A read of a page or more was cut by chance: its last line is about to go on. The end of a shorter
one is shown at once, since a progress bar ends its lines with a carriage return."""

_MAX_REST_LENGTH = 16384

Piece = tuple[Monitor, bytes]


class LineRouter:
    """The output of one launch on its way to the parts: in order, no byte twice."""

    def __init__(self, parts: Sequence[Monitor]) -> None:
        self._parts = [part for part in parts if type(part).on_output is not Monitor.on_output]
        self._sieve = TemplateFilter({word for part in self._parts for word in part.words or ()})
        self._rest = b""
        self._begun = False
        """The beginning of the line that comes next was shown."""

    def pieces(self, chunk: bytes) -> Iterator[Piece]:
        """What to show to whom, now that `chunk` has come."""
        data = self._rest + chunk if self._rest else chunk
        begin = data.find(b"\n") + 1 if self._begun else 0
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        if begin:
            yield from self._to_all(data[:begin])
            self._begun = False
        if end > begin:
            yield from self._lines(LineChunk(data[begin:end] if begin or end < len(data) else data))
        if self._begun or len(chunk) < _MORE_TO_COME or len(self._rest) > _MAX_REST_LENGTH:
            yield from self.rest()

    def rest(self) -> Iterator[Piece]:
        """The unfinished line that was kept back."""
        if self._rest:
            rest, self._rest, self._begun = self._rest, b"", True
            yield from self._to_all(rest)

    def _to_all(self, text: bytes) -> Iterator[Piece]:
        return ((part, text) for part in self._parts)

    def _lines(self, lines: LineChunk) -> Iterator[Piece]:
        loud = self._sieve.loud(lines)
        found = b""
        if loud:
            texts = lines.split(b"\n")
            found = b"".join(
                texts[index] + b"\n" for index, shape in enumerate(lines.shapes) if shape in loud
            )
        for part in self._parts:
            if part.words is None:
                yield part, lines
            elif found:
                yield part, found
        lines.forget()
