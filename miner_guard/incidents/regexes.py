"""Searches text with regular expressions, and derives facts such as the words that a match
needs."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Union

if sys.version_info >= (3, 11):
    from re import _constants as ops
    from re import _parser as parser
else:
    import sre_constants as ops
    import sre_parse as parser

_MIN_WORD_LENGTH = 3
"""Shorter words occur in nearly every line, and so do numbers."""

_LONG = 1024
"""Longer texts are searched only at the beginning and around certain words."""

_REACH = 300
"""Characters to search on either side of a word if a match can have any length."""

_SEEN_BESIDE = 100
"""Maximum number of characters that an assertion without a repeat reads on either side of a
match."""

_MAX_PLACES = 8
"""Search around at most this many occurrences of a word, counted from each end of the line. A
megabyte of one repeated word would otherwise cost a search per occurrence."""

_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""Parts of an expression: an escaped character, a set of characters, or one character."""

_REPEATS = (ops.MAX_REPEAT, ops.MIN_REPEAT)
_ASSERTIONS = (ops.ASSERT, ops.ASSERT_NOT)
_ONE_CHARACTER = (ops.LITERAL, ops.NOT_LITERAL, ops.IN, ops.ANY)
_WITHOUT_CHARACTERS = (ops.AT, ops.ANY, ops.CATEGORY, ops.NEGATE)
_DIGITS = frozenset(map(ord, "0123456789"))
_ALL_OR_NO_DIGITS = (len(_DIGITS), 0)


@dataclass(frozen=True)
class AllOf:
    """Requires all of these. An empty `AllOf` requires nothing."""

    of: tuple[Requirement, ...]


@dataclass(frozen=True)
class AnyOf:
    """Requires at least one of these."""

    of: tuple[Requirement, ...]


Requirement = Union[bytes, AllOf, AnyOf]
NOTHING = AllOf(())


class RegexSearch:
    """Searches for one expression. Computes its properties only when a line needs them, because
    compiling every expression would take half of the guard's start-up time."""

    def __init__(self, expression: str) -> None:
        self.expression = expression

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The compiled expression."""
        return re.compile(self.expression)

    @cached_property
    def _alternatives(self) -> list[_Alternative]:
        return [_Alternative(each) for each in alternatives(self.expression)]

    @cached_property
    def needs(self) -> Requirement:
        """Words that a text needs for the expression to match."""
        needs = tuple(each.needs for each in self._alternatives)
        return needs[0] if len(needs) == 1 else NOTHING if NOTHING in needs else AnyOf(needs)

    @cached_property
    def tells_digits_apart(self) -> bool:
        """Whether replacing digits in the text with other digits may change the result."""
        return tells_digits_apart(_items(self.expression))

    def found_in(
        self, text: str, near: Iterable[str] = (), words: Collection[bytes] | None = None
    ) -> bool:
        """Whether the expression matches in `text`. Searches a long text only around the words
        that the expression needs; if it needs none, at the beginning and around the words in
        `near`. `words` are the expression's words that occur in `text`, if known."""
        if len(text) < _LONG:
            return self.regex.search(text) is not None
        # If nothing is needed, the caller did not search for the words of the alternatives.
        present = None if self.needs == NOTHING else words
        return any(each.found_in(text, near, present) for each in self._alternatives)


class _Alternative:
    """Searches a long text for one alternative of an expression."""

    def __init__(self, expression: str) -> None:
        self._expression = expression
        self.needs = requirement(expression)
        self._marks = marks(self.needs)
        self._anchored = expression.startswith("^")

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return re.compile(self._expression)

    @cached_property
    def _width(self) -> int | None:
        return width(self._expression)

    def found_in(self, text: str, near: Iterable[str], words: Collection[bytes] | None) -> bool:
        """See RegexSearch.found_in."""
        if words is not None and not met(self.needs, words):
            return False
        reach = _REACH if self._width is None else self._width
        if self._marks:
            # The rarest words leave the least text to search.
            found = min((_all_places(text, marked, words) for marked in self._marks), key=len)
        else:
            found, reach = _all_places(text, map(str.encode, near), None), reach + _REACH
        whole = self._marks and self._width is not None and len(found) < _MAX_PLACES
        beginning = () if whole else ((0, _LONG),)
        return any(
            self._regex.search(text, start, end) is not None
            for start, end in (*beginning, *windows(found, reach))
            if not (start and self._anchored)
        )


def requirement(regex: str) -> Requirement:
    """The words without which `regex` cannot match. Searching for words is far cheaper than
    searching for the expression."""
    return _sequence(_items(regex))


def met(needed: Requirement, words: Collection[bytes]) -> bool:
    """Whether a text can match if `words` are the required words that it contains."""
    if isinstance(needed, bytes):
        return needed in words
    every = isinstance(needed, AllOf)
    for inner in needed.of:
        if met(inner, words) is not every:
            return not every
    return every


def words_of(needed: Requirement) -> Iterator[bytes]:
    """Every word in the requirement."""
    if isinstance(needed, bytes):
        yield needed
    else:
        for inner in needed.of:
            yield from words_of(inner)


def marks(needed: Requirement) -> list[frozenset[bytes]]:
    """Sets of words; every match contains at least one word from each set."""
    if isinstance(needed, bytes):
        return [frozenset({needed})]
    inner = [marks(part) for part in needed.of]
    if isinstance(needed, AllOf):
        return [words for sets in inner for words in sets]
    return [frozenset().union(*(max(sets, key=_shortest) for sets in inner))] if all(inner) else []


def _shortest(words: frozenset[bytes]) -> int:
    return min(map(len, words))


def width(regex: str) -> int | None:
    """Maximum number of characters that a match and its assertions read; None if unbounded."""
    items = _items(regex)
    if any(any(_unbounded(part)) for part in (items, *_asserted(items))):
        return None
    return parser.parse(regex).getwidth()[1] + _SEEN_BESIDE


def windows(places: Iterable[tuple[int, int]], reach: int) -> Iterator[tuple[int, int]]:
    """The spans of a text that can contain a match of at most `reach` characters around a word.
    `places` gives the offset and length of each word."""
    start = end = -1
    for at, length in sorted(places):
        if at - reach > end:
            if end >= 0:
                yield start, end
            start = max(at - reach, 0)
        end = max(end, at + length + reach)
    if end >= 0:
        yield start, end


def alternatives(regex: str) -> list[str]:
    """The parts of `regex` that are separated by `|` outside any group."""
    found = [""]
    depth = 0
    for part in _PARTS.findall(regex):
        depth += part.startswith("(") - (part == ")")
        if part == "|" and not depth:
            found.append("")
        else:
            found[-1] += part
    return found


def tells_digits_apart(items: Iterable[Any]) -> bool:
    """Whether a parsed expression accepts one digit where it rejects another."""
    for op, argument in items:
        if op in (ops.LITERAL, ops.NOT_LITERAL):
            apart = argument in _DIGITS
        elif op is ops.IN:
            apart = len(_DIGITS.intersection(_listed(argument))) not in _ALL_OR_NO_DIGITS
        elif op is ops.BRANCH:
            apart = any(map(tells_digits_apart, argument[1]))
        elif op is ops.SUBPATTERN:
            apart = tells_digits_apart(argument[3])
        elif op in _REPEATS:
            apart = tells_digits_apart(argument[2])
        elif op in _ASSERTIONS:
            apart = tells_digits_apart(argument[1])
        else:
            apart = op not in _WITHOUT_CHARACTERS
        if apart:
            return True
    return False


def _listed(characters: Iterable[Any]) -> Iterator[int]:
    """The codes of the literal characters and the digits in a set. Categories are left out, since
    a category contains either all digits or none."""
    for op, argument in characters:
        if op is ops.LITERAL:
            yield argument
        elif op is ops.RANGE:
            yield from _DIGITS.intersection(range(argument[0], argument[1] + 1))


def superlinear(regex: str) -> str | None:
    """Why a search for `regex` may take more than linear time; None if it cannot.

    A search tries every position in the text. If every repeat is bounded, each attempt takes
    at most constant time. An expression that begins with `^` is tried only once, so it may contain
    one unbounded repeat of a single character.
    """
    for branch in _branches(_items(regex)):
        anchored = (
            bool(branch)
            and branch[0][0] is ops.AT
            and branch[0][1] in (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING)
        )
        for loops in (
            list(_unbounded(branch)),
            *(list(_unbounded(inner)) for inner in _asserted(branch)),
        ):
            if loops and not anchored:
                return "an unbounded repeat; add a bound such as {0,40}, or begin the regex with ^"
            if len(loops) > 1:
                return "two unbounded repeats; add a bound such as {0,40} to one of them"
            if loops and (len(loops[0]) != 1 or loops[0][0][0] not in _ONE_CHARACTER):
                return "a group is repeated without a bound; add one such as {0,8}"
    return None


def _all_places(
    text: str, words: Iterable[bytes], present: Collection[bytes] | None
) -> list[tuple[int, int]]:
    """Offset and length of every occurrence of `words` in `text`. If `present` is given, looks only
    for the words in it."""
    return [
        (at, len(word))
        for word in words
        if present is None or word in present
        for at in _places(text, word.decode())
    ]


@lru_cache(maxsize=64)
def _places(text: str, word: str) -> tuple[int, ...]:
    """The first and last `_MAX_PLACES` offsets of `word`, which are enough for a line that repeats
    itself. Cached, because many expressions need the same words."""
    first: list[int] = []
    at = text.find(word)
    while at >= 0 and len(first) < _MAX_PLACES:
        first.append(at)
        at = text.find(word, at + 1)
    if at < 0:
        return tuple(first)
    last: list[int] = []
    end = len(text)
    while len(last) < _MAX_PLACES and (place := text.rfind(word, at, end)) >= 0:
        last.append(place)
        end = place + len(word) - 1
    return (*first, *reversed(last))


def _items(regex: str) -> list[Any]:
    parsed: Any = parser.parse(regex)
    return list(parsed)


def _sequence(items: Iterable[Any]) -> Requirement:
    needed: list[Requirement] = []
    word = ""
    for op, argument in items:
        if op is ops.LITERAL:
            word += chr(argument)
            continue
        needed += _word(word)
        word = ""
        if (inner := _item(op, argument)) != NOTHING:
            needed.append(inner)
    needed += _word(word)
    return needed[0] if len(needed) == 1 else AllOf(tuple(needed))


def _word(word: str) -> list[Requirement]:
    usual = len(word) < _MIN_WORD_LENGTH or word.isdigit()
    return [] if usual else [word.encode()]


def _item(op: Any, argument: Any) -> Requirement:
    if op is ops.BRANCH:
        choices = tuple(_sequence(branch) for branch in argument[1])
        return NOTHING if NOTHING in choices else AnyOf(choices)
    if op is ops.SUBPATTERN:
        return _sequence(argument[3])
    if op in _REPEATS and argument[0] > 0:
        return _sequence(argument[2])
    return NOTHING


def _branches(items: list[Any]) -> list[list[Any]]:
    if len(items) == 1 and items[0][0] is ops.BRANCH:
        return [list(branch) for branch in items[0][1][1]]
    return [items]


def _unbounded(items: Iterable[Any]) -> Iterator[list[Any]]:
    """The unbounded repeats in a sequence, except those in assertions."""
    for op, argument in items:
        if op in _REPEATS:
            if argument[1] == ops.MAXREPEAT:
                yield list(argument[2])
            yield from _unbounded(argument[2])
        elif op is ops.SUBPATTERN:
            yield from _unbounded(argument[3])
        elif op is ops.BRANCH:
            yield from max((list(_unbounded(branch)) for branch in argument[1]), key=len)


def _asserted(items: Iterable[Any]) -> Iterator[list[Any]]:
    """The contents of a sequence's assertions, at any depth."""
    for op, argument in items:
        if op in _ASSERTIONS:
            yield list(argument[1])
            yield from _asserted(argument[1])
        elif op in _REPEATS:
            yield from _asserted(argument[2])
        elif op is ops.SUBPATTERN:
            yield from _asserted(argument[3])
        elif op is ops.BRANCH:
            for branch in argument[1]:
                yield from _asserted(branch)
