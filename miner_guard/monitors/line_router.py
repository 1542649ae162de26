"""Routes the miner's output to the monitors: raw bytes or whole lines, filtered by what each
needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from miner_guard.eventlog.line_templates import LineChunk, TemplateFilter
from miner_guard.monitors.base import Monitor

MAX_LINE_BYTES = 64 * 1024
"""Longer lines are truncated to this: log lines are shorter, and memory stays bounded."""

_MORE_TO_COME = 4096
"""A read of at least a page ends at an arbitrary position, so its last line is about to continue.
The end of a shorter read is delivered immediately, since a progress bar ends its lines with a
carriage return."""

_MAX_REST_LENGTH = 16384


class Delivery(NamedTuple):
    """The next delivery to one monitor, and the method to call."""

    monitor: Monitor
    method: Literal["on_output", "on_lines"]
    argument: bytes | Sequence[bytes]


class LineRouter:
    """Delivers the output of one launch to the monitors: in order, every byte once."""

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self._raw = [m for m in monitors if type(m).on_output is not Monitor.on_output]
        self._by_line = [
            m
            for m in monitors
            if type(m).on_lines is not Monitor.on_lines and m.words != frozenset()
        ]
        self._sieve = TemplateFilter(
            {word for m in (*self._raw, *self._by_line) for word in m.words or ()}
        )
        self._rest = b""
        self._begun = False
        """The raw readers have received the beginning of the next line."""

        self._line = b""
        """That beginning, kept for the line readers."""

    def pieces(self, chunk: bytes) -> Iterator[Delivery]:
        """The deliveries for a new `chunk`."""
        data = self._rest + chunk if self._rest else chunk
        begin = data.find(b"\n") + 1 if self._begun else 0
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        if begin:
            yield from self._to_raw(data[:begin])
            yield from self._unrouted([*self._redraws(data[: begin - 1]), self._take_line()])
            self._begun = False
        if end > begin:
            yield from self._block(LineChunk(data[begin:end] if begin or end < len(data) else data))
        if self._begun or len(chunk) < _MORE_TO_COME or len(self._rest) > _MAX_REST_LENGTH:
            yield from self.rest()

    def rest(self) -> Iterator[Delivery]:
        """Deliver the unfinished line that was held back."""
        if self._rest:
            rest, self._rest, self._begun = self._rest, b"", True
            yield from self._to_raw(rest)
            yield from self._unrouted(self._redraws(rest))

    def end(self) -> Iterator[Delivery]:
        """The output is complete: deliver the last line as it is."""
        yield from self.rest()
        yield from self._unrouted([self._take_line()])

    def _redraws(self, text: bytes) -> list[bytes]:
        """The lines that end in a carriage return; the unfinished rest is kept for the next
        call."""
        *redraws, last = (self._line + text).split(b"\r")
        self._line = last[:MAX_LINE_BYTES]
        return redraws

    def _take_line(self) -> bytes:
        line, self._line = self._line, b""
        return line

    def _to_raw(self, text: bytes) -> Iterator[Delivery]:
        return (Delivery(monitor, "on_output", text) for monitor in self._raw)

    def _unrouted(self, lines: Iterable[bytes]) -> Iterator[Delivery]:
        """Deliver lines that arrived in fragments."""
        every = [line[:MAX_LINE_BYTES] for line in lines if line]
        return self._to_line_readers(every, self._sieve.holding(every))

    def _to_line_readers(
        self, every: Sequence[bytes], matching: Sequence[bytes]
    ) -> Iterator[Delivery]:
        for monitor in self._by_line:
            lines = every if monitor.words is None else matching
            if lines:
                yield Delivery(monitor, "on_lines", lines)

    def _block(self, block: LineChunk) -> Iterator[Delivery]:
        matching = self._sieve.matching(block)
        found: list[bytes] = []
        if matching:
            texts = block.split(b"\n")
            found = [texts[at] for at, shape in enumerate(block.templates) if shape in matching]
        for monitor in self._raw:
            if monitor.words is None:
                yield Delivery(monitor, "on_output", block)
            elif found:
                yield Delivery(monitor, "on_output", b"\n".join([*found, b""]))
        # Splitting the whole block pays off only if a monitor reads all lines.
        everything = any(monitor.words is None for monitor in self._by_line)
        # One search of the block is faster than a split of each line, which few blocks need.
        lines_of = _whole_lines if block.find(b"\r") < 0 else _lines_of
        every = lines_of(block.split(b"\n")) if everything else []
        yield from self._to_line_readers(every, lines_of(found))
        block.forget()


def _whole_lines(texts: Iterable[bytes]) -> list[bytes]:
    """`_lines_of` texts without carriage returns."""
    return [text[:MAX_LINE_BYTES] for text in texts if text]


def _lines_of(texts: Iterable[bytes]) -> list[bytes]:
    """Split at carriage returns, so that each redraw of a progress bar counts as a line; skip empty
    lines."""
    return [line[:MAX_LINE_BYTES] for text in texts for line in text.split(b"\r") if line]
