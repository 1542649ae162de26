"""Routes the miner's output to the monitors, as blocks of whole lines or line by line. A monitor
that lists words costs nothing while none of them occurs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from miner_guard.system.word_search import WordSearch
from miner_guard.watch.base import Monitor

MAX_LINE_BYTES = 64 * 1024
"""Longer lines are truncated to this length, which bounds memory; real log lines are shorter."""

_MORE_TO_COME = 4096
"""A read of at least this size ends at an arbitrary position, so the rest of its last line is still
to come. A shorter read is delivered in full immediately: it may be a progress bar, which ends its
lines with a carriage return."""


class Delivery(NamedTuple):
    """The next delivery to one monitor, and the method to call."""

    monitor: Monitor
    method: Literal["on_output", "on_lines"]
    argument: bytes | Sequence[bytes]


class LineRouter:
    """Delivers one launch's output to the monitors, in order and each byte at most once."""

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self._raw = [m for m in monitors if type(m).on_output is not Monitor.on_output]
        self._by_line = [
            m
            for m in monitors
            if type(m).on_lines is not Monitor.on_lines and m.words != frozenset()
        ]
        readers = (*self._raw, *self._by_line)
        self._search = WordSearch({word for m in readers for word in m.words or ()})
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
            yield from self._to_line_readers(self._redraws(chunk[: begin - 1]) + self._last_line())
            self._begun = False
        if end > begin:
            yield from self._block(rest + chunk[begin:end])
        if self._begun or len(chunk) < _MORE_TO_COME or len(self._rest) > MAX_LINE_BYTES:
            yield from self.rest()

    def rest(self) -> Iterator[Delivery]:
        """Deliver the unfinished line that was held back."""
        if self._rest:
            rest, self._rest, self._begun = self._rest, b"", True
            yield from self._to_raw(rest)
            yield from self._to_line_readers(self._redraws(rest))

    def end(self) -> Iterator[Delivery]:
        """The output is complete: deliver the last line as it is."""
        yield from self.rest()
        yield from self._to_line_readers(self._last_line())

    def _redraws(self, text: bytes) -> list[bytes]:
        """The lines that end in a carriage return; the unfinished rest is kept for the next
        call."""
        *redraws, last = (self._line + text).split(b"\r")
        self._line = last[:MAX_LINE_BYTES]
        return redraws

    def _last_line(self) -> list[bytes]:
        line, self._line = self._line, b""
        return [line]

    def _to_raw(self, text: bytes) -> Iterator[Delivery]:
        return (Delivery(monitor, "on_output", text) for monitor in self._raw)

    def _to_line_readers(self, lines: Iterable[bytes]) -> Iterator[Delivery]:
        whole = [line[:MAX_LINE_BYTES] for line in lines if line]
        if not whole:
            return
        words = self._search.found_in(b"\n".join(whole))
        listening = [m for m in self._by_line if _concerns(m, words)]
        # The lines in lower case, made once for all monitors that list words.
        small = [line.lower() for line in whole] if any(m.words for m in listening) else []
        for monitor in listening:
            if monitor.words is None:
                yield Delivery(monitor, "on_lines", whole)
            elif chosen := _having(monitor.words & words, whole, small):
                yield Delivery(monitor, "on_lines", chosen)

    def _block(self, block: bytes) -> Iterator[Delivery]:
        words = self._search.found_in(block)
        for monitor in self._raw:
            if _concerns(monitor, words):
                yield Delivery(monitor, "on_output", block)
        # Splitting the block costs more than searching it.
        if any(_concerns(m, words) for m in self._by_line):
            # Each redraw of a progress bar counts as a line.
            text = block.replace(b"\r", b"\n") if b"\r" in block else block
            yield from self._to_line_readers(text.split(b"\n"))


def _concerns(monitor: Monitor, words: set[bytes]) -> bool:
    return monitor.words is None or not words.isdisjoint(monitor.words)


def _having(words: frozenset[bytes], lines: list[bytes], small: list[bytes]) -> list[bytes]:
    """The lines with one of these words; `small` holds the lines in lower case."""
    if len(words) == 1:
        (word,) = words
        return [line for line, low in zip(lines, small, strict=True) if word in low]
    return [
        line for line, low in zip(lines, small, strict=True) if any(word in low for word in words)
    ]
