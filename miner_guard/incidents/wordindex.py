"""Which of a thousand words a line holds, without asking for each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

_GRAM = 4

Payload = TypeVar("Payload", bound=Hashable)


class WordIndex(Generic[Payload]):
    """Words (any strings) with what hangs on them. Immutable; safe from any thread.

    Each word is filed under its rarest four letters. A line's own four-letter pieces then lead to
    the few words that can stand in it; words that are shorter are simply tried.
    """

    def __init__(self, entries: Iterable[tuple[str, Payload]]) -> None:
        by_word: dict[str, list[Payload]] = {}
        for word, payload in entries:
            by_word.setdefault(word, []).append(payload)
        usual = Counter(gram for word in by_word for gram in set(_grams(word)))
        self._short: dict[str, Sequence[Payload]] = {}
        self._filed: dict[str, list[tuple[str, Sequence[Payload]]]] = {}
        for word, payloads in by_word.items():
            if len(word) < _GRAM:
                self._short[word] = payloads
            else:
                self._filed.setdefault(min(_grams(word), key=usual.__getitem__), []).append(
                    (word, payloads)
                )

    def find(self, text: str) -> dict[Payload, None]:
        """What hangs on the words of `text`, each once, in no useful order."""
        found: dict[Payload, None] = {}
        for gram in self._filed.keys() & set(_grams(text)):
            for word, payloads in self._filed[gram]:
                if word in text:
                    found.update(dict.fromkeys(payloads))
        for word, payloads in self._short.items():
            if word in text:
                found.update(dict.fromkeys(payloads))
        return found


def _grams(text: str) -> list[str]:
    return [text[at : at + _GRAM] for at in range(len(text) - _GRAM + 1)]
