"""Finds which of many literals a text contains. The time is linear in the text for any input.

Hyperscan searches gigabytes per second. If it cannot run (no wheel for this machine, a processor
without SSSE3), an index by four letters gives the same answers; it is slower, but linear too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Protocol

try:
    import hyperscan
except ImportError:
    hyperscan = None  # type: ignore[assignment]

_GRAM = 4


class LiteralSearch(Protocol):
    """Searches for a fixed set of literals. Thread-safe."""

    def find(self, text: bytes) -> set[bytes]:
        """The literals that occur in `text`; case-sensitive."""


def literal_search(literals: Iterable[bytes]) -> LiteralSearch:
    """The fastest search that this machine can run. Literals must not be empty or contain a NUL."""
    words = sorted(set(literals))
    if hyperscan is not None and words:
        try:
            return HyperscanSearch(words)
        except hyperscan.error:
            return IndexSearch(words)
    return IndexSearch(words)


class HyperscanSearch:
    """Searches with Hyperscan. The constructor raises `hyperscan.error` if the processor is too
    old."""

    def __init__(self, literals: Sequence[bytes]) -> None:
        self._literals = list(literals)
        self._database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
        self._database.compile(
            expressions=self._literals,
            ids=list(range(len(self._literals))),
            flags=[hyperscan.HS_FLAG_SINGLEMATCH] * len(self._literals),
            literal=True,
        )
        self._scratch = Lock()
        """Guards Hyperscan's scratch memory, which serves one search at a time."""

    def find(self, text: bytes) -> set[bytes]:
        """See LiteralSearch."""
        found: list[int] = []

        def matched(number: int, *_: object) -> None:
            found.append(number)

        with self._scratch:
            self._database.scan(text, match_event_handler=matched)
        return {self._literals[number] for number in found}


class IndexSearch:
    """Indexes each literal by its rarest four letters.

    The four-letter substrings of the text select the few literals that the text can contain. A
    literal shorter than four letters is searched for directly.
    """

    def __init__(self, literals: Iterable[bytes]) -> None:
        words = set(literals)
        usual = Counter(gram for word in words for gram in _grams(word))
        self._short = [word for word in words if len(word) < _GRAM]
        self._filed: dict[bytes, list[bytes]] = {}
        for word in words:
            if len(word) >= _GRAM:
                self._filed.setdefault(min(_grams(word), key=usual.__getitem__), []).append(word)

    def find(self, text: bytes) -> set[bytes]:
        """See LiteralSearch."""
        found = {word for word in self._short if word in text}
        for gram in self._filed.keys() & _grams(text):
            found.update(word for word in self._filed[gram] if word in text)
        return found


def _grams(text: bytes) -> set[bytes]:
    return {text[at : at + _GRAM] for at in range(len(text) - _GRAM + 1)}
