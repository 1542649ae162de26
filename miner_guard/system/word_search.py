"""Finds which of many words occur in a text, ignoring case, in one scan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from threading import Lock
from typing import Any

try:
    import hyperscan
except ImportError:
    # There is no wheel for this platform.
    hyperscan = None  # type: ignore[assignment]


class WordSearch:
    """A fixed set of words. Thread-safe. Hyperscan searches at about 1 GB/s. Without it, or on a
    processor that it does not support, the answers are the same and take a hundred times as long.
    """

    def __init__(self, words: Iterable[bytes]) -> None:
        """Raises ValueError if a word is empty."""
        self.words: Sequence[bytes] = sorted({word.lower() for word in words})
        if b"" in self.words:
            raise ValueError("a word to search for is empty")
        self._scratch = Lock()
        """Guards Hyperscan's scratch memory, which serves one scan at a time."""

    def found_in(self, text: bytes) -> set[bytes]:
        """The words that occur in `text`."""
        if self._each_once is None:
            small = text.lower()
            return {word for word in self.words if word in small}
        occurring: set[bytes] = set()

        def matched(number: int, *_span: Any) -> None:
            occurring.add(self.words[number])

        with self._scratch:
            self._each_once.scan(text, match_event_handler=matched)
        return occurring

    def lines_in(self, text: bytes) -> list[tuple[int, int]]:
        """Start and end of each line of `text` that holds a word, in order."""
        spans: list[tuple[int, int]] = []
        last = -1

        def matched(number: int, *span: Any) -> None:
            nonlocal last
            end = span[1]
            if end <= last:
                return
            start = text.rfind(b"\n", 0, end - len(self.words[number])) + 1
            last = text.find(b"\n", end - 1)
            last = len(text) if last < 0 else last
            spans.append((start, last))

        if self._every is not None:
            with self._scratch:
                self._every.scan(text, match_event_handler=matched)
            return spans
        at = 0
        for line in text.lower().split(b"\n"):
            if any(word in line for word in self.words):
                spans.append((at, at + len(line)))
            at += len(line) + 1
        return spans

    @cached_property
    def _each_once(self) -> Any:
        return self._compiled(once=True)

    @cached_property
    def _every(self) -> Any:
        return self._compiled(once=False)

    def _compiled(self, *, once: bool) -> Any:
        """Hyperscan's database for the words; None if Hyperscan cannot run."""
        if hyperscan is None or not self.words:
            return None
        flags = hyperscan.HS_FLAG_CASELESS | (hyperscan.HS_FLAG_SINGLEMATCH if once else 0)
        database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
        try:
            database.compile(
                expressions=list(self.words),
                ids=list(range(len(self.words))),
                flags=[flags] * len(self.words),
                literal=True,
            )
        except hyperscan.error:
            return None
        return database
