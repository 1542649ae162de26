"""Finds which of many literals a text contains. Takes linear time for any input.

Hyperscan searches gigabytes per second. If it cannot run (no wheel for this machine, a processor
without SSSE3), an index of the words' letters gives the same answers, more slowly but also in
linear time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from threading import Lock
from typing import Any, Protocol

try:
    import hyperscan
except ImportError:
    hyperscan = None  # type: ignore[assignment]

_RUN = re.compile(rb"[A-Za-z_]+")
_LETTERS = bytes(code if _RUN.fullmatch(bytes([code])) else ord(" ") for code in range(256))
_MIN_RUN = 3
_GRAM = 4
_MAX_KNOWN = 8192
_MAX_KNOWN_LENGTH = 64


class LiteralSearch(Protocol):
    """Searches for a fixed set of literals. Thread-safe."""

    def find(self, text: bytes) -> set[bytes]:
        """The literals that occur in `text`; case-sensitive."""


def literal_search(literals: Iterable[bytes]) -> LiteralSearch:
    """Build the fastest search for this machine. Literals must not be empty or contain a NUL."""
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
        with self._scratch:
            self._database.scan(text, match_event_handler=_matched, context=found)
        return set(map(self._literals.__getitem__, found))


def _matched(number: int, *place_and_found: Any) -> None:
    place_and_found[-1].append(number)


class IndexSearch:
    """Indexes each literal by its longest run of letters, and each run by its rarest four letters.

    Words recur in a text, so the search remembers which literals each word may belong to, and looks
    for runs only in new words. It searches for a literal without a run directly.
    """

    def __init__(self, literals: Iterable[bytes]) -> None:
        self._direct: list[bytes] = []
        self._by_run: dict[bytes, list[bytes]] = {}
        for literal in set(literals):
            run = max(_RUN.findall(literal), key=len, default=b"")
            whole = len(run) >= _MIN_RUN
            (self._by_run.setdefault(run, []) if whole else self._direct).append(literal)
        usual = Counter(gram for run in self._by_run for gram in _grams(run))
        self._short = frozenset(run for run in self._by_run if len(run) < _GRAM)
        self._filed: dict[int, list[bytes]] = {}
        for run in self._by_run:
            if len(run) >= _GRAM:
                self._filed.setdefault(min(_grams(run), key=usual.__getitem__), []).append(run)
        self._keys = frozenset(self._filed)
        self._known: dict[bytes, Sequence[bytes]] = {}
        """Maps recent words to the literals whose runs they contain."""

    def find(self, text: bytes) -> set[bytes]:
        """See LiteralSearch."""
        known, words = self._known, set(text.translate(_LETTERS).split())
        new = self._learned(words.difference(known))
        possible = {*self._direct}.union(
            *new.values(), *(known[word] for word in words if word not in new)
        )
        return {literal for literal in possible if literal in text}

    def _learned(self, words: set[bytes]) -> Mapping[bytes, Sequence[bytes]]:
        """For each of `words`, the literals whose runs it contains."""
        if not words:
            return {}
        learned: dict[bytes, Sequence[bytes]] = dict.fromkeys(words, ())
        together = b" ".join(words)
        for run in self._runs_in(together):
            for word in set(parts_with(run, together, b" ")):
                learned[word] = (*learned[word], *self._by_run[run])
        if len(words) <= _MAX_KNOWN:
            # Another thread may still use the old dictionary.
            full = len(self._known) + len(words) > _MAX_KNOWN
            known = {} if full else self._known
            known.update((w, found) for w, found in learned.items() if len(w) <= _MAX_KNOWN_LENGTH)
            self._known = known
        return learned

    def _runs_in(self, text: bytes) -> list[bytes]:
        grams = {gram for part in _in_fours(text) for gram in self._keys.intersection(part)}
        filed = (run for gram in grams for run in self._filed[gram])
        brief = len(text) < len(self._short)
        short = self._short.intersection(_threes(text)) if brief else self._short
        return [run for run in chain(short, filed) if run in text]


def _threes(text: bytes) -> Iterator[bytes]:
    return (text[at : at + _MIN_RUN] for at in range(len(text) - _MIN_RUN + 1))


def _grams(text: bytes) -> Iterator[int]:
    return chain.from_iterable(_in_fours(text))


def _in_fours(text: bytes) -> Iterator[memoryview[int]]:
    """The four-byte substrings, as numbers: those at offsets 0, 4, 8, …, then those at 1, 5, …,
    and so on. Converting four bytes to a number takes a third as long as copying them."""
    view = memoryview(text)
    for start in range(min(_GRAM, len(text) - _GRAM + 1)):
        yield view[start : start + (len(text) - start) // _GRAM * _GRAM].cast("I")


def parts_with(literal: bytes, text: bytes, separator: bytes) -> Iterator[bytes]:
    """The parts of `text`, split at `separator`, that contain `literal`."""
    at = text.find(literal)
    while at >= 0:
        end = text.find(separator, at)
        end = len(text) if end < 0 else end
        yield text[text.rfind(separator, 0, at) + 1 : end]
        at = text.find(literal, end)
