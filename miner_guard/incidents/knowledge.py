"""The known errors, read from the `*.toml` files next to this module.

A file holds one table per label: `severity`, `restart`, `applies`, `role`, `cause`, `fixes`,
`follows`, `events` and `patterns`. A pattern matches a line (lower-cased, without colour codes and
prefixes) that contains one of the words in `has`, none of those in `not`, and a match for `regex`.
`has` keeps matching cheap: lines without any of its words are skipped. `servers` names a list in
the file's `[words]` table; a line that names a server must contain one word from that list.
`answer` names a table in the file's `[answers]`, whose `cause`, `fix` and `source` several patterns
share.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar, Union

from miner_guard.eventlog.literal_search import LiteralSearch, literal_search
from miner_guard.incidents.general import GeneralLayer, numbers_in
from miner_guard.incidents.log_lines import BEGINS, CHAINED, IGNORED, REMARKABLE, WITHOUT_DIGITS
from miner_guard.incidents.parsing import Document, Index, check_expressions, index_of, parsed
from miner_guard.incidents.patterns import ROLES, Benign, Label, Pattern

_K = TypeVar("_K")
_V = TypeVar("_V")

_HERE = Path(__file__).parent
_INDEX = "words.toml"

_MARKS = frozenset(word.encode() for word in (BEGINS, *IGNORED, *CHAINED))
"""Words that matter even if no pattern contains them."""

_MAX_ANSWERS = 512
_MAX_ANSWERED_LENGTH = 400

_DIGIT = re.compile(rb"\d")
_NONE: frozenset[bytes] = frozenset()

_Shape = tuple[bytes, frozenset[bytes]]
"""The text with each digit replaced by 0, plus any pattern words in it that contain digits. Two
texts with the same shape contain the same words."""

_Key = Union[str, _Shape]


@dataclass
class _Answer:
    """What a text matches."""

    matches: list[Pattern] | Benign
    framed: list[int]
    """Indices of the patterns with frames that may match the text and its traceback."""

    found: dict[int, bool] = field(default_factory=dict)
    """For each of these patterns checked so far, whether it matches the text."""

    classes: int | None = None
    """The general layer's classes in the text; None until computed."""


class _Possible(NamedTuple):
    """The patterns that a text with the given words may match, in order."""

    harmless: list[Benign]
    patterns: list[Pattern]
    framed: list[int]
    """Indices of the patterns with frames that may match such an exception and its traceback."""

    tells_digits_apart: bool
    """Whether two texts with the same shape may match differently."""


class Knowledge:
    """All labels and patterns. Thread-safe.

    The files are read by `prepare`, or when the first line with a trigger arrives, because parsing
    TOML in Python would take a sixth of the guard's start-up time.
    """

    def __init__(self, index: Index, read: Callable[[], Document]) -> None:
        self.triggers = index.triggers
        """Lower-case words without digits. Every line that can match contains at least one."""

        self._events = index.events
        self._read = read
        self._latest: tuple[str, frozenset[bytes]] = ("", frozenset())
        """The last text searched and its words. Exceptions are searched twice."""

        self._answers: dict[_Key, _Answer] = {}
        """Results for recent lines. Ranks, restarts and loops print the same lines, perhaps with
        different numbers."""

        self._passed: dict[bytes, frozenset[int]] = {}
        """For recent tracebacks, the patterns whose files they pass through."""

        self._latest_answer: tuple[str, _Answer] = ("", _Answer([], []))
        self._possible: dict[frozenset[bytes], _Possible] = {}
        """What lines may match, keyed by the words in recent lines."""

    def prepare(self, between: Callable[[], None] = lambda: None) -> None:
        """Read the files and build all searches except the general layer's, which most miners never
        need. Calls `between` after each, because building a search needs several times the memory
        of the finished search. Raises BadKnowledge."""
        for part in ("_search", "_numeric", "_by_word", "_framed_by_word", "_paths", "_order"):
            assert getattr(self, part)
            between()

    @cached_property
    def _document(self) -> Document:
        return self._read()

    @property
    def labels(self) -> Mapping[str, Label]:
        """All labels by name."""
        return self._document.labels

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The patterns of all labels."""
        return self._document.patterns

    @cached_property
    def general(self) -> GeneralLayer:
        """Identifies errors that no pattern matches."""
        return GeneralLayer(self._document.grammar)

    def unmatched(self, name: str, text: str, frames: bytes) -> Pattern | None:
        """What the general layer makes of an exception with this name, text and frames."""
        if len(text) > _MAX_ANSWERED_LENGTH:
            return self.general.exception(name, self.general.classes_in(text), frames)
        general, answer = self.general, self._answer(text.lower())
        if answer.classes is None:
            answer.classes = general.classes_in(text)
        return general.exception(name, answer.classes, frames)

    @property
    def entries(self) -> tuple[Pattern, ...]:
        """All patterns, including those for benign lines."""
        return (*self.patterns, *(b.pattern for b in self._document.benign))

    def shown_by(self, event: str) -> Sequence[str]:
        """Labels whose cause is shown by this guard event."""
        return self._causes_by_event.get(event, ()) if event in self._events else ()

    @cached_property
    def _causes_by_event(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in sorted({p.label for p in self.patterns if p.role == "cause"}):
            for event in self.labels[name].events:
                found.setdefault(event, []).append(name)
        return found

    @cached_property
    def _framed(self) -> list[Pattern]:
        return sorted((p for p in self.patterns if p.frames), key=lambda p: p.says_little)

    @property
    def _ordered(self) -> tuple[Pattern | Benign, ...]:
        return (*self._document.benign, *self.patterns)

    @cached_property
    def _search(self) -> LiteralSearch:
        return literal_search((*map(str.encode, REMARKABLE), *self._words))

    @cached_property
    def _words(self) -> frozenset[bytes]:
        return frozenset(word for entry in self.entries for word in entry.literals)

    @cached_property
    def _numeric(self) -> LiteralSearch:
        general = chain.from_iterable(self._document.grammar.words.values())
        numbers = chain.from_iterable(map(numbers_in, general))
        words = (word for word in self._words if _DIGIT.search(word))
        return literal_search((*words, *numbers))

    @cached_property
    def _by_word(self) -> dict[bytes, list[Pattern | Benign]]:
        found: dict[bytes, list[Pattern | Benign]] = {}
        for entry in self._ordered:
            pattern = _pattern(entry)
            for word in () if pattern.frames else pattern.any_of:
                found.setdefault(word, []).append(entry)
        return found

    @cached_property
    def _paths(self) -> tuple[LiteralSearch, Mapping[bytes, frozenset[int]]]:
        """A search for the strings that patterns require in a traceback's paths, both as they are
        and with each digit replaced by 0. Also maps each string to the indices of the patterns that
        require it."""
        paths = {path for pattern in self._framed for path in pattern.frames}
        by_path = {
            path.encode(): frozenset(n for n, p in enumerate(self._framed) if path in p.frames)
            for path in {"", *paths}
        }
        masked = (path.translate(WITHOUT_DIGITS) for path in by_path)
        return literal_search(path for path in (*by_path, *masked) if path), by_path

    @cached_property
    def _framed_by_word(self) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = {}
        for number, pattern in enumerate(self._framed):
            for word in pattern.any_of:
                found.setdefault(word, []).append(number)
        return found

    @cached_property
    def _order(self) -> dict[Pattern | Benign, int]:
        return {entry: n for n, entry in enumerate(self._ordered)}

    def match(self, text: str, past: Set[bytes] = frozenset()) -> list[Pattern] | Benign:
        """The matches of a lower-cased, cleaned line: a benign entry, or one pattern per label
        with causes first.

        `text` may be a piece of a long line. `past` contains the words (see `words`) in the earlier
        pieces; patterns that have only these words were already searched for there.
        """
        if past or len(text) > _MAX_ANSWERED_LENGTH:
            return self._look_up(text, past)
        return self._answer(text).matches

    def _answer(self, text: str) -> _Answer:
        """The answer for `text`, possibly cached from a text with the same shape."""
        latest, answer = self._latest_answer
        if latest == text:
            return answer
        shape = self._shape(text)
        known = self._answers.get(shape) or self._answers.get(text)
        if known is None:
            possible = self._possible_with(self.words(text))
            known = _Answer(self._look_up(text, _NONE), possible.framed)
            key = text if possible.tells_digits_apart else shape
            _keep(self._answers, key, known, _MAX_ANSWERS)
        self._latest_answer = (text, known)
        return known

    def _shape(self, text: str) -> _Shape:
        encoded = text.encode(errors="replace")
        masked = encoded.translate(WITHOUT_DIGITS)
        return masked, frozenset(self._numeric.find(encoded)) if b"0" in masked else _NONE

    def adds(self, text: str, past: Set[bytes]) -> bool:
        """Whether this piece of a long line may show more than the earlier pieces did; `past` holds
        their words."""
        words = self.words(text)
        new = words - past
        if not new:
            return False
        harmless, patterns, *_ = self._possible_with(words)
        possible = chain((benign.pattern for benign in harmless), patterns)
        return not new.isdisjoint(_MARKS) or any(not new.isdisjoint(p.literals) for p in possible)

    def words(self, text: str) -> frozenset[bytes]:
        """The words from all patterns and from `log_lines.REMARKABLE` that occur in `text`."""
        latest, words = self._latest
        if latest != text:
            words = frozenset(self._search.find(text.encode(errors="replace")))
            self._latest = (text, words)
        return words

    def _look_up(self, text: str, past: Set[bytes]) -> list[Pattern] | Benign:
        words = self.words(text)
        new = words - past
        harmless, patterns, *_ = self._possible_with(words)
        found: dict[str, Pattern] = {}
        for pattern in patterns:
            known = pattern.label in found or (past and new.isdisjoint(pattern.literals))
            if not known and pattern.matches(text, words):
                found[pattern.label] = pattern
        if found or any(
            not past or ((b.cancels or b.notice) and b.pattern.literals & new) for b in harmless
        ):
            for benign in harmless:
                if benign.pattern.matches(text, words):
                    return benign
        if len(found) > 1:
            found = {label: p for label, p in found.items() if not p.alone} or found
        return sorted(found.values(), key=lambda p: ROLES.index(p.role))

    def _possible_with(self, words: frozenset[bytes]) -> _Possible:
        """The entries that a text with these words may match, in order."""
        possible = self._possible.get(words)
        if possible is None:
            entries = {entry for word in words for entry in self._by_word.get(word, ())}
            fit = [
                entry
                for entry in sorted(entries, key=self._order.__getitem__)
                if _pattern(entry).possible(words)
            ]
            numbers = {n for word in words for n in self._framed_by_word.get(word, ())}
            framed = [n for n in sorted(numbers) if self._framed[n].possible(words)]
            every = (*map(_pattern, fit), *map(self._framed.__getitem__, framed))
            possible = _Possible(
                [entry for entry in fit if isinstance(entry, Benign)],
                [entry for entry in fit if isinstance(entry, Pattern)],
                framed,
                any(pattern.tells_digits_apart for pattern in every),
            )
            _keep(self._possible, words, possible, _MAX_ANSWERS)
        return possible

    def match_in(
        self, frames: str, text: str, matches: Sequence[Pattern] = (), shown: bytes = b""
    ) -> list[Pattern]:
        """The matches for an exception together with its traceback. `frames` lists the traceback's
        files, and `shown` is its text. `matches` are the matches for the exception alone."""
        if len(text) <= _MAX_ANSWERED_LENGTH:
            answer = self._answer(text)
        else:
            answer = _Answer([], self._possible_with(self.words(text)).framed)
        if not answer.framed:
            return list(matches)
        named = {p.label for p in matches if not p.alone}
        fit = self._fit(frames)
        for number in answer.framed:
            p = self._framed[number]
            if (
                number in fit
                and (p.instead & named if named else not p.instead)
                and self._is_found(number, text, answer)
                and (not p.through or _shows(p.through, shown))
            ):
                others = (
                    m for m in matches if m.label not in p.instead | {p.label} and not m.alone
                )
                return [p, *others]
        return list(matches)

    def _is_found(self, number: int, text: str, answer: _Answer) -> bool:
        found = answer.found.get(number)
        if found is None:
            found = self._framed[number].matches(text, self.words(text))
            answer.found[number] = found
        return found

    def _fit(self, frames: str) -> frozenset[int]:
        """Indices of the patterns that match a traceback through these files."""
        encoded = frames.encode(errors="replace")
        shape = encoded.translate(WITHOUT_DIGITS)
        fit = self._passed.get(shape)
        if fit is None:
            search, by_path = self._paths
            passed = search.find(shape)
            exact = not any(map(_DIGIT.search, passed))
            if not exact:
                passed = search.find(encoded) & by_path.keys()
            fit = by_path[b""].union(*(by_path[path] for path in passed))
            if exact and len(shape) <= _MAX_ANSWERED_LENGTH:
                _keep(self._passed, shape, fit, _MAX_ANSWERS)
        return fit


def _pattern(entry: Pattern | Benign) -> Pattern:
    return entry.pattern if isinstance(entry, Benign) else entry


def _shows(texts: Sequence[str], frames: bytes) -> bool:
    lowered = frames.lower()
    return any(text.encode() in lowered for text in texts)


def _keep(cache: dict[_K, _V], key: _K, value: _V, most: int) -> None:
    if len(cache) >= most:
        cache.clear()
    cache[key] = value


@lru_cache(maxsize=1)
def load() -> Knowledge:
    """Load the knowledge shipped with the package. Only the tests check its expressions. Raises
    BadKnowledge."""
    return Knowledge(index_of(_file(_INDEX)), lambda: parsed(shipped()))


def shipped() -> dict[str, str]:
    """The TOML documents in the package, keyed by file name; `xids.toml` is NVIDIA's catalogue, not
    patterns (`miner_guard.incidents.xids`)."""
    names = (name for name in sorted(os.listdir(_HERE)) if name.endswith(".toml"))
    return {name: _file(name) for name in names if name != "xids.toml"}


def _file(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def parse(texts: Mapping[str, str]) -> Knowledge:
    """Parse TOML documents, keyed by file name, and check their expressions. Raises
    BadKnowledge."""
    document = parsed(texts)
    known = Knowledge(document.index, lambda: document)
    check_expressions(known.entries)
    return known
