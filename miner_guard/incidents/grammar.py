"""The grammar of the general layer: classes of words, and rules that combine them.

`general.toml` explains the format. `general.py` applies it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from miner_guard.incidents.patterns import RESTARTS, BadKnowledge, Label, Pattern

PARTS = ("says", "raised", "through", "at")
"""The keys in a rule that list classes, one for each part of an error: its message, the exception's
name, the frames of the traceback, and the deepest frame."""

_ABOUT = "about"
_MESSAGE, FRAMES = PARTS.index("says"), PARTS.index("through")
"""Texts at index `FRAMES` and above are frames; their classes are those in `frames`."""

_TABLES = ["errors", "frames", "harmless", "rules", "words"]
_KEYS = {*PARTS, _ABOUT, "label", "not", "lines", "cause", "fix", "source"}
_WORD = re.compile(r"\*?[a-z0-9]+(?: [a-z0-9]+)*\*?")
_UNCERTAIN = {"config": "once", "hardware": "once", "never": "once"}
"""The restart policy for labels from the general layer, which may be wrong: a restart is always
worth a try."""


@dataclass(frozen=True)
class Need:
    """Requires at least one text to contain one of the classes listed for it. Texts are given by
    their index in `PARTS`."""

    places: tuple[tuple[int, tuple[str, ...]], ...]

    def classes(self, *, frames: bool) -> set[str]:
        """Its frame classes, or else its word classes."""
        return {
            name for place, names in self.places for name in names if (place >= FRAMES) is frames
        }


@dataclass(frozen=True, eq=False)
class Rule:
    """A combination of classes that indicates a label."""

    pattern: Pattern
    """What the rule reports. The pattern has no words of its own."""

    needs: tuple[Need, ...]
    excludes: tuple[Need, ...] = ()
    lines: bool = False
    """Whether the rule also applies to lines that report an error without an exception."""


@dataclass(frozen=True)
class ErrorGrammar:
    """Classes of words and frames, and the rules in the order they are tried."""

    words: Mapping[str, tuple[str, ...]]
    """Word classes, found in messages."""

    frames: Mapping[str, tuple[str, ...]]
    """Frame classes, found in tracebacks."""

    rules: tuple[Rule, ...]
    errors: tuple[str, ...] = ()
    """A line without an exception is examined only if it contains one of these classes."""

    harmless: tuple[str, ...] = ()
    """A line that contains one of these classes is ignored, unless it reports an exception."""


EMPTY = ErrorGrammar({}, {}, ())


def parsed(where: str, table: Mapping[str, Any], labels: Mapping[str, Label]) -> ErrorGrammar:
    """The grammar in a TOML table. Raises BadKnowledge."""
    if unknown := table.keys() - {*_TABLES}:
        raise BadKnowledge(f"{where}: unknown key {sorted(unknown)[0]}; allowed: {_TABLES}")
    words = {name: tuple(each) for name, each in table["words"].items()}
    for name, each in words.items():
        if wrong := [word for word in each if not _WORD.fullmatch(word)]:
            raise BadKnowledge(
                f"{where}: {name}: {wrong[0]!r} is not a valid word; use lower-case letters, "
                "digits and single spaces, with an optional * at either end"
            )
    frames = {name: tuple(each) for name, each in table["frames"].items()}
    for name, each in frames.items():
        if loud := [text for text in each if text != text.lower()]:
            raise BadKnowledge(f"{where}: {name}: {loud[0]!r} contains capital letters")
    rules = tuple(_rule(where, entry, labels) for entry in table["rules"])
    lines = Need(((_MESSAGE, (*table["errors"], *table["harmless"])),))
    for need in (lines, *chain.from_iterable((*rule.needs, *rule.excludes) for rule in rules)):
        unknown = (
            need.classes(frames=False) - words.keys() | need.classes(frames=True) - frames.keys()
        )
        if unknown:
            raise BadKnowledge(f"{where}: {sorted(unknown)[0]} is not a class")
    return ErrorGrammar(words, frames, rules, tuple(table["errors"]), tuple(table["harmless"]))


def _rule(where: str, entry: Mapping[str, Any], labels: Mapping[str, Label]) -> Rule:
    if unknown := entry.keys() - _KEYS:
        raise BadKnowledge(f"{where}: unknown key {sorted(unknown)[0]} in a rule")
    label = labels.get(entry.get("label", ""))
    if label is None:
        raise BadKnowledge(f"{where}: {entry.get('label')!r} in a rule is not a label")
    needs, excludes = tuple(_needs(entry)), tuple(_needs(entry.get("not", {})))
    if not needs:
        raise BadKnowledge(f"{where}: a rule for {label.name} has no requirements")
    return Rule(_pattern(label, entry), needs, excludes, entry.get("lines", False))


def _needs(entry: Mapping[str, Any]) -> Iterator[Need]:
    for place, key in enumerate(PARTS):
        for classes in entry.get(key, ()):
            yield Need(((place, tuple(classes.split("|"))),))
    for classes in entry.get(_ABOUT, ()):
        said, _, passed = (tuple(part.split("|")) for part in classes.partition(", "))
        yield Need(((_MESSAGE, said), (FRAMES, passed)))


def _pattern(label: Label, entry: Mapping[str, Any]) -> Pattern:
    role = "exception" if label.role == "cause" else label.role
    restart = _UNCERTAIN.get(label.restart, label.restart)
    assert restart in RESTARTS
    return Pattern(
        label.name,
        role,
        (),
        (),
        None,
        cause=entry.get("cause", ""),
        fix=entry.get("fix", ""),
        source=entry.get("source", ""),
        restart=restart,
    )
