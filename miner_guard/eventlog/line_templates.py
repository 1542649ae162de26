"""Log templates: lines without their digits. A miner prints the same few templates over and over.

If one line of a template lacks a word, all lines of the template lack it. So the guard splits the
output into templates once and searches only new templates for words (the idea of Drain, He et al.
2017, reduced to dropping digits).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice

from miner_guard.eventlog.literal_search import literal_search

_LOWER = bytes(range(256)).lower()
_NUMBERS = b"0123456789+-."
_MAX_TEMPLATES = 4096
_MAX_TEMPLATE_LENGTH = 1024
_MANY = 64
"""If more lines than this contain a word, it pays to search only the other lines for the next
word."""


def template(text: bytes) -> bytes:
    """`text` in lower case, without digits, signs and points."""
    return text.translate(_LOWER, _NUMBERS)


class LineChunk(bytes):
    """Output in whole lines. It computes its templates once, for all readers."""

    @cached_property
    def templates(self) -> list[bytes]:
        """The template of each line, and of what follows the last newline."""
        return template(self).split(b"\n")

    @cached_property
    def distinct(self) -> frozenset[bytes]:
        """The distinct templates."""
        return frozenset(self.templates)

    def forget(self) -> None:
        """Free the templates, so that a reader that keeps the text does not keep them in memory."""
        self.__dict__.clear()


def _lines_with(word: bytes, text: bytes) -> Iterator[bytes]:
    at = text.find(word)
    while at >= 0:
        end = text.find(b"\n", at)
        end = len(text) if end < 0 else end
        yield text[text.rfind(b"\n", 0, at) + 1 : end]
        at = text.find(word, end)


class TemplateFilter:
    """Finds lines that contain one of the words, and remembers the templates that contain none of
    them. Uses bounded memory."""

    def __init__(self, words: Iterable[bytes]) -> None:
        """`words` must be templates (see `template`), without newlines."""
        self._words = tuple(words)
        self._search = literal_search(self._words)
        self._quiet: set[bytes] = set()

    def holds(self, text: bytes) -> bool:
        """Whether the template `text` contains a word."""
        return bool(self._search.find(text))

    def matching(self, lines: LineChunk) -> set[bytes]:
        """The templates of `lines` that contain a word."""
        new = lines.distinct - self._quiet
        if not new:
            return set()
        together = b"\n".join(new)
        matching: set[bytes] = set()
        for word in self._search.find(together):
            holding = set(_lines_with(word, together))
            matching |= holding
            if len(holding) > _MANY:
                together = b"\n".join(new - matching)
        self._remember(new - matching)
        return matching

    def _remember(self, quiet: Iterable[bytes]) -> None:
        if len(self._quiet) > _MAX_TEMPLATES:
            self._quiet.clear()
        self._quiet.update(
            text for text in islice(quiet, _MAX_TEMPLATES) if len(text) <= _MAX_TEMPLATE_LENGTH
        )
