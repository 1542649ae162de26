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


class Delivery(NamedTuple):
    """The next delivery to one monitor, and the method to call."""

    monitor: Monitor
    method: Literal["on_output", "on_lines"]
    argument: bytes | Sequence[bytes]


class LineRouter:
    """Delivers one launch's output to the monitors, in order and each byte at most once. A line
    ends with a newline or, as a progress bar's redraw, with a carriage return."""

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self._raw = [m for m in monitors if type(m).on_output is not Monitor.on_output]
        self._by_line = [
            m
            for m in monitors
            if type(m).on_lines is not Monitor.on_lines and m.words != frozenset()
        ]
        readers = (*self._raw, *self._by_line)
        self._search = WordSearch({word for m in readers for word in m.words or ()})
        self._rest: list[bytes] = []
        """The pieces of an unfinished line."""

        self._cut = False
        """Whether the beginning of an unfinished line has already been delivered as a line."""

    def pieces(self, chunk: bytes) -> Iterator[Delivery]:
        """The deliveries for a new `chunk`. An unfinished line waits for its end."""
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if end:
            block = b"".join((*self._rest, chunk[:end]))
            self._rest = [chunk[end:]]
            yield from self._block(block, whole=True)
        else:
            self._rest.append(chunk)
        if sum(map(len, self._rest)) > MAX_LINE_BYTES:
            yield from self._block(b"".join(self._rest), whole=False)
            self._rest = []

    def end(self) -> Iterator[Delivery]:
        """The output is complete: deliver the last line as it is."""
        rest, self._rest = b"".join(self._rest), []
        return self._block(rest, whole=True)

    def _block(self, block: bytes, *, whole: bool) -> Iterator[Delivery]:
        words = self._search.found_in(block)
        for monitor in self._raw:
            if block and _concerns(monitor, words):
                yield Delivery(monitor, "on_output", block)
        cut, self._cut = self._cut, not whole
        listening = [m for m in self._by_line if _concerns(m, words)]
        if not listening:
            # Splitting the block costs more than searching it.
            return
        lines = block.replace(b"\r", b"\n").split(b"\n")[int(cut) :]
        lines = [line[:MAX_LINE_BYTES] for line in lines if line]
        # The lines in lower case, made once for all monitors that list words.
        small = [line.lower() for line in lines] if any(m.words for m in listening) else []
        for monitor in listening:
            if monitor.words is None:
                chosen = lines
            else:
                matches = monitor.words & words
                pairs = zip(lines, small, strict=True)
                chosen = [line for line, low in pairs if any(word in low for word in matches)]
            if chosen:
                yield Delivery(monitor, "on_lines", chosen)


def _concerns(monitor: Monitor, words: Iterable[bytes]) -> bool:
    return monitor.words is None or not monitor.words.isdisjoint(words)
