"""Log templates: lines without their digits. A miner prints the same few templates over and over.

If one line lacks a word, so do all lines with the same template. So the guard splits the output
into templates once and searches only new templates for words (an idea from Drain, He et al. 2017,
reduced to dropping digits).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from functools import cached_property
from itertools import islice

from miner_guard.eventlog.literal_search import literal_search, parts_with

_LOWER = bytes(range(256)).lower()
_NUMBERS = b"0123456789+-."
_MAX_TEMPLATES = 4096
MAX_TEMPLATE_LENGTH = 512
"""Longer templates are not remembered, because they hardly ever recur."""

_MANY = 64
"""If more lines than this contain a word, searching only the other lines for the next word saves
time."""


_SAMPLE = 1024
"""Number of leading bytes to check for base64 before processing all of a long text."""

_ENCODED_LINE = re.compile(rb"^[A-Za-z0-9+/=]{48,}\r?$", re.MULTILINE)


def without_encoded_lines(text: bytes) -> bytes:
    """Blank out base64 lines in `text`, because short words occur in base64 by chance. A long text
    without base64 near its start is returned unchanged, which at worst slows down the search."""
    if _ENCODED_LINE.search(text, 0, _SAMPLE) is None and len(text) > _SAMPLE:
        return text
    return _ENCODED_LINE.sub(b"", text)


def template(text: bytes) -> bytes:
    """`text` in lower case, without digits, signs or decimal points."""
    return text.translate(_LOWER, _NUMBERS)


def templates(text: bytes) -> tuple[list[bytes], frozenset[bytes]]:
    """Return the template of each line of `text`, and the set of distinct templates."""
    each = template(text).split(b"\n")
    return each, frozenset(each)


class LineChunk(bytes):
    """Output in whole lines. Computes its templates only once, for all readers."""

    @cached_property
    def _computed(self) -> tuple[list[bytes], frozenset[bytes]]:
        return templates(without_encoded_lines(self))

    @property
    def templates(self) -> list[bytes]:
        """The template of each line, and of the text after the last newline; empty for a base64
        line."""
        return self._computed[0]

    @property
    def distinct(self) -> frozenset[bytes]:
        """The distinct templates."""
        return self._computed[1]

    def forget(self) -> None:
        """Free the templates, so that a reader that keeps the text does not keep the templates in
        memory too."""
        self.__dict__.clear()


class TemplateFilter:
    """Finds lines that contain any of the words, and remembers which templates do. Uses bounded
    memory."""

    def __init__(self, words: Iterable[bytes]) -> None:
        """`words` must be templates (see `template`), without newlines."""
        self._search = literal_search(words)
        self._quiet: set[bytes] = set()
        self._loud: set[bytes] = set()
        self._latest: tuple[bytes, set[bytes]] = (b"", set())
        """The last text searched, and its words."""

    def words(self, text: bytes) -> set[bytes]:
        """Return the words that the template `text` contains."""
        latest, words = self._latest
        if latest != text:
            words = self._search.find(text)
            self._latest = (text, words)
        return words

    def holds(self, text: bytes) -> bool:
        """Return True if the template `text` contains any of the words."""
        return bool(self.words(text))

    def holding(self, texts: Sequence[bytes]) -> list[bytes]:
        """Return the `texts`, each a part of a line, whose template contains any of the words."""
        together = template(b"\n".join(texts))
        words = self.words(together)
        if not words:
            return []
        shapes = together.split(b"\n")
        return [
            text
            for text, shape in zip(texts, shapes, strict=True)
            if any(word in shape for word in words)
        ]

    def matching(self, lines: LineChunk) -> Set[bytes]:
        """Return the templates of `lines` that contain any of the words."""
        known = lines.distinct & self._loud
        new = lines.distinct - self._quiet - known
        if not new:
            return known
        together = b"\n".join(new)
        matching: set[bytes] = set()
        for word in self.words(together):
            holding = set(parts_with(word, together, b"\n"))
            matching |= holding
            if len(holding) > _MANY:
                together = b"\n".join(new - matching)
        _remember(self._quiet, new - matching)
        _remember(self._loud, matching)
        return known | matching


def _remember(known: set[bytes], new: Iterable[bytes]) -> None:
    short = [text for text in islice(new, _MAX_TEMPLATES) if len(text) <= MAX_TEMPLATE_LENGTH]
    if len(known) + len(short) > _MAX_TEMPLATES:
        known.clear()
    known.update(short)
