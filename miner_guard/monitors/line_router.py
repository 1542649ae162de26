"""Routes the miner's output to the monitors, as raw bytes or as whole lines, and filters them for
monitors that list words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from miner_guard.eventlog.line_templates import (
    MAX_TEMPLATE_LENGTH,
    LineChunk,
    TemplateFilter,
    template,
)
from miner_guard.monitors.base import Monitor

MAX_LINE_BYTES = 64 * 1024
"""Longer lines are truncated to this length, which bounds memory; real log lines are shorter."""

_MORE_TO_COME = 4096
"""A read of at least this size ends at an arbitrary position, so the rest of its last line is still
to come. A shorter read is delivered in full immediately: it may be a progress bar, which ends its
lines with a carriage return."""

_MAX_REST_LENGTH = MAX_LINE_BYTES
"""An unfinished line longer than this is delivered in fragments, which cost more to search than a
whole line."""

_MAX_KNOWN = 1024
"""Number of templates whose readers are remembered."""

_LinesOf = Callable[[Iterable[bytes]], list[bytes]]


class Delivery(NamedTuple):
    """The next delivery to one monitor, and the method to call."""

    monitor: Monitor
    method: Literal["on_output", "on_lines"]
    argument: bytes | Sequence[bytes]


class Found(NamedTuple):
    """A line, and the monitors that it concerns."""

    text: bytes
    readers: frozenset[Monitor]


class LineRouter:
    """Delivers one launch's output to the monitors, in order and each byte at most once."""

    def __init__(
        self,
        monitors: Sequence[Monitor],
        reads_lines: Callable[[Monitor], bool] = lambda monitor: monitor.reads_lines(),
    ) -> None:
        self._reads_lines = reads_lines
        self._raw = [m for m in monitors if type(m).on_output is not Monitor.on_output]
        self._by_line = [
            m
            for m in monitors
            if type(m).on_lines is not Monitor.on_lines and m.words != frozenset()
        ]
        self._seekers = [m for m in (*self._raw, *self._by_line) if m.words]
        self._sieve = TemplateFilter({word for m in self._seekers for word in m.words or ()})
        self._known: dict[bytes, frozenset[Monitor]] = {}
        """The monitors that receive each template's lines, for recent templates."""

        self._rest = b""
        self._begun = False
        """Whether the raw readers have already received the start of an unfinished line."""

        self._line = b""
        """The start of an unfinished line, kept until the line readers can receive it whole."""

    def pieces(self, chunk: bytes) -> Iterator[Delivery]:
        """The deliveries for a new `chunk`."""
        begin = chunk.find(b"\n") + 1 if self._begun else 0
        end = chunk.rfind(b"\n") + 1
        rest, self._rest = self._rest, chunk[end:] if end else self._rest + chunk
        if begin:
            yield from self._to_raw(chunk[:begin])
            yield from self._unrouted([*self._redraws(chunk[: begin - 1]), self._take_line()])
            self._begun = False
        if end > begin:
            # Use a view, because copying a flood of output costs as much as searching it.
            yield from self._block(LineChunk(b"".join((rest, memoryview(chunk)[begin:end]))))
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
        listening = self._listening()
        found = [
            Found(line, self._concerned(template(line)) & listening)
            for line in self._sieve.holding(every)
        ]
        return self._to_line_readers(every, found, _whole_lines)

    def _to_line_readers(
        self, every: Sequence[bytes], found: Sequence[Found], lines_of: _LinesOf
    ) -> Iterator[Delivery]:
        for monitor in self._by_line:
            if monitor.words is None:
                lines = every
            else:
                lines = lines_of(text for text, readers in found if monitor in readers)
            if lines and self._reads_lines(monitor):
                yield Delivery(monitor, "on_lines", lines)

    def _listening(self) -> frozenset[Monitor]:
        return frozenset(monitor for monitor in self._seekers if self._reads_lines(monitor))

    def _concerned(self, shape: bytes) -> frozenset[Monitor]:
        """The monitors with at least one word that occurs in the template `shape`."""
        concerned = self._known.get(shape)
        if concerned is None:
            words = self._sieve.words(shape)
            concerned = frozenset(m for m in self._seekers if not words.isdisjoint(m.words or ()))
            if len(shape) <= MAX_TEMPLATE_LENGTH:
                if len(self._known) >= _MAX_KNOWN:
                    self._known.clear()
                self._known[shape] = concerned
        return concerned

    def _block(self, block: LineChunk) -> Iterator[Delivery]:
        found = self._found(block)
        for monitor in self._raw:
            if monitor.words is None:
                yield Delivery(monitor, "on_output", block)
            elif texts := [text for text, readers in found if monitor in readers]:
                yield Delivery(monitor, "on_output", b"\n".join([*texts, b""]))
        # Splitting the whole block pays off only if a monitor reads all lines.
        everything = any(m.words is None and self._reads_lines(m) for m in self._by_line)
        # Searching the block once is faster than splitting each line, which few blocks need.
        lines_of = _whole_lines if block.find(b"\r") < 0 else _lines_of
        every = lines_of(block.split(b"\n")) if everything else []
        yield from self._to_line_readers(every, found, lines_of)
        block.forget()

    def _found(self, block: LineChunk) -> list[Found]:
        """The lines with words that a listening monitor looks for, each with those monitors."""
        listening = self._listening()
        readers = {
            shape: concerned
            for shape in self._sieve.matching(block)
            if (concerned := self._concerned(shape) & listening)
        }
        if not readers:
            return []
        return [
            Found(text, readers[shape])
            for text, shape in zip(block.split(b"\n"), block.templates, strict=True)
            if shape in readers
        ]


def _whole_lines(texts: Iterable[bytes]) -> list[bytes]:
    """`_lines_of` for texts without carriage returns."""
    return [text[:MAX_LINE_BYTES] for text in texts if text]


def _lines_of(texts: Iterable[bytes]) -> list[bytes]:
    """Split at carriage returns, so that each redraw of a progress bar counts as a line; skip empty
    lines."""
    return [line[:MAX_LINE_BYTES] for text in texts for line in text.split(b"\r") if line]
