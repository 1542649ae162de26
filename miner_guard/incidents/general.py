"""The general layer: identifies an error that no pattern matches by what failed and how.

It looks for classes of words instead of phrases. An error is reduced to the sets of classes in its
texts, so the search takes linear time, and equal sets share one cached answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple, TypeVar

from miner_guard.eventlog.literal_search import literal_search
from miner_guard.incidents.grammar import FRAMES, ErrorGrammar, Need, Rule
from miner_guard.incidents.patterns import Pattern

_K = TypeVar("_K")
_V = TypeVar("_V")

_MAX_TEXT = 400
"""How many characters of a message to read. The rest of a longer message often mentions other
faults."""

_MAX_NAMES = 120
"""Names within this many characters of the start of a message are split into words."""

_MAX_ANSWERS = 512

_CAPITALS = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Where to split a name such as `ConnectionResetError` into words."""

_TO_WORDS = bytes(
    ord(" ") if not chr(code).isalnum() or code > 127 else ord(chr(code).lower())
    for code in range(256)
)
_DROPPED = b"\"'`"
"""Quotes are removed, so `isn't` becomes `isnt`."""

_TO_FRAMES = bytes(
    ord("0") if chr(code).isdigit() else ord(chr(code).lower()) if code < 128 else code
    for code in range(256)
).replace(b"\\", b"/")
"""Digits in frames vary, but never affect the class."""

_BEFORE_NUMBERS = (" ", ": ", "=", "': ", '": ')
_DIGIT = re.compile(r"\d")
_FRAME = b'file "'


class Texts(NamedTuple):
    """The classes in each text of an error, as bits. `grammar.PARTS` lists the texts."""

    message: int
    name: int = 0
    frames: int = 0
    deepest: int = 0


_Mask = Sequence[tuple[int, int]]
"""Pairs of a text's index and a bit mask of classes. At least one of the texts must contain one of
its classes."""


class _Masks(NamedTuple):
    rule: Rule
    needs: list[_Mask]
    excludes: list[_Mask]


class GeneralLayer:
    """Applies a grammar. Thread-safe."""

    def __init__(self, grammar: ErrorGrammar) -> None:
        self.grammar = grammar
        self._words = _Classes(
            {name: [*map(literal, words)] for name, words in grammar.words.items()}
        )
        self._frames = _Classes(
            {
                name: [text.encode().translate(_TO_FRAMES) for text in texts]
                for name, texts in grammar.frames.items()
            }
        )
        self._rules = [
            _Masks(rule, self._masks(rule.needs), self._masks(rule.excludes))
            for rule in grammar.rules
        ]
        self._errors = self._words.mask(grammar.errors)
        self._harmless = self._words.mask(grammar.harmless)
        self._answers: dict[tuple[Texts, bool], Pattern | None] = {}
        self._names: dict[str, int] = {}
        self._exceptions: dict[tuple[str, int, int], Pattern | None] = {}
        """Keyed by name, the message's classes and a hash of the frames without their digits."""

    def _masks(self, needs: Iterable[Need]) -> list[_Mask]:
        return [
            [
                (text, (self._words if text < FRAMES else self._frames).mask(names))
                for text, names in need.places
            ]
            for need in needs
        ]

    def classes_in(self, message: str) -> int:
        """The word classes in a message, as bits."""
        return self._words.found_in(_words(message))

    def exception(self, name: str, message: int, frames: bytes) -> Pattern | None:
        """Classify an exception by its name, the classes in its message and its frames."""
        shown = frames.translate(_TO_FRAMES)
        key = name, message, hash(shown)
        if key not in self._exceptions:
            if name not in self._names:
                _keep(self._names, name, self.classes_in(name))
            texts = Texts(message, self._names.get(name, 0), *self._in_frames(shown))
            _keep(self._exceptions, key, self._answer(texts, lines=False))
        return self._exceptions.get(key)

    def line(self, text: str) -> Pattern | None:
        """Classify a line that reports an error without an exception."""
        message = self.classes_in(text)
        if message & self._harmless or not message & self._errors:
            return None
        return self._answer(Texts(message), lines=True)

    def _in_frames(self, shown: bytes) -> tuple[int, int]:
        """The classes in all frames, and those in the deepest frame."""
        anywhere = self._frames.found_in(shown)
        deepest = shown[max(shown.rfind(_FRAME), 0) :] if anywhere else b""
        return anywhere, self._frames.found_in(deepest) if deepest else 0

    def _answer(self, texts: Texts, *, lines: bool) -> Pattern | None:
        key = texts, lines
        if key not in self._answers:
            fit = (m.rule.pattern for m in self._rules if _fits(m, texts, lines=lines))
            _keep(self._answers, key, next(fit, None))
        return self._answers.get(key)


class _Classes:
    """Finds the classes that have at least one of their literals in a text."""

    def __init__(self, literals: Mapping[str, Iterable[bytes]]) -> None:
        self._bits = {name: 1 << number for number, name in enumerate(literals)}
        self._classes: dict[bytes, int] = {}
        for name, each in literals.items():
            for one in each:
                self._classes[one] = self._classes.get(one, 0) | self._bits[name]
        self._search = literal_search(self._classes)

    def mask(self, names: Iterable[str]) -> int:
        """The bits for these classes."""
        return reduce(or_, (self._bits[name] for name in names), 0)

    def found_in(self, text: bytes) -> int:
        """The bits for the classes that occur in `text`."""
        found = 0
        for one in self._search.find(text):
            found |= self._classes[one]
        return found


def literal(word: str) -> bytes:
    """The bytes to search for. A whole word or phrase is surrounded by spaces; `*` stands for any
    letters."""
    start, end = ("" if word.startswith("*") else " "), ("" if word.endswith("*") else " ")
    return f"{start}{word.strip('*')}{end}".encode()


def numbers_in(word: str) -> Iterator[bytes]:
    """Strings with digits that a log must contain for this word of the grammar to occur."""
    before, _, last = word.strip("*").rpartition(" ")
    if before and last.isdigit():
        # The 5 in `errno 5` is part of many other numbers, so keep the name before it.
        yield from (f"{before}{by}{last}".encode() for by in _BEFORE_NUMBERS)
    else:
        yield from (part.encode() for part in word.strip("*").split() if _DIGIT.search(part))


def _words(text: str) -> bytes:
    apart = _CAPITALS.sub(" ", text[:_MAX_NAMES])
    words = (
        f"{apart}{text[_MAX_NAMES:_MAX_TEXT]}".encode("ascii", "replace")
        .translate(_TO_WORDS, _DROPPED)
        .split()
    )
    return b" %b " % b" ".join(words)


def _fits(masks: _Masks, texts: Texts, *, lines: bool) -> bool:
    return (
        (masks.rule.lines or not lines)
        and all(any(texts[text] & mask for text, mask in need) for need in masks.needs)
        and not any(texts[text] & mask for need in masks.excludes for text, mask in need)
    )


def _keep(cache: dict[_K, _V], key: _K, value: _V) -> None:
    if len(cache) >= _MAX_ANSWERS:
        cache.clear()
    cache[key] = value
