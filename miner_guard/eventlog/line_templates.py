"""Lines without their numbers: a miner prints the same few shapes of line over and over.

What a line of a known shape does not hold, no line of that shape holds. So ordinary output is cut
into shapes once, and only a new shape is searched for words.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import islice

from miner_guard.eventlog.literal_search import literal_search

_LOWER = bytes(range(256)).lower()
_NUMBERS = b"0123456789+-."
_MAX_SHAPES = 4096
_MAX_SHAPE_LENGTH = 1024


def template(text: bytes) -> bytes:
    """`text` in small letters, without digits, signs and points."""
    return text.translate(_LOWER, _NUMBERS)


class LineChunk(bytes):
    """Output cut at line ends. What is computed of it is computed once, for all who look at it."""

    @cached_property
    def shapes(self) -> list[bytes]:
        """The shape of each line; one more than there are newlines."""
        return template(self).split(b"\n")

    @cached_property
    def distinct(self) -> frozenset[bytes]:
        """Each shape once."""
        return frozenset(self.shapes)

    def forget(self) -> None:
        """Free what was computed: who keeps the text should not keep its shapes."""
        self.__dict__.clear()


class TemplateFilter:
    """Finds lines that hold a word, and remembers the shapes that hold none. Memory is bounded."""

    def __init__(self, words: Iterable[bytes]) -> None:
        """`words` are shapes themselves (see `shape`), without newlines."""
        self._words = tuple(words)
        self._search = literal_search(self._words)
        self._quiet: set[bytes] = set()

    def holds(self, text: bytes) -> bool:
        """Whether the shape `text` holds a word."""
        return bool(self._search.find(text))

    def loud(self, lines: LineChunk) -> set[bytes]:
        """Those of the shapes that hold a word."""
        new = lines.distinct - self._quiet
        if not new:
            return set()
        together = b"\n".join(new)
        words = self._search.find(together)
        loud = {text for text in new if any(word in text for word in words)}
        self._remember(new - loud)
        return loud

    def _remember(self, quiet: Iterable[bytes]) -> None:
        if len(self._quiet) > _MAX_SHAPES:
            self._quiet.clear()
        self._quiet.update(
            text for text in islice(quiet, _MAX_SHAPES) if len(text) <= _MAX_SHAPE_LENGTH
        )
