"""Reads the knowledge files. An invalid file raises an error that names the file, label and key."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from miner_guard.incidents import grammar, regexes
from miner_guard.incidents.patterns import (
    APPLIES,
    RESTARTS,
    ROLES,
    SEVERITIES,
    BadKnowledge,
    Benign,
    Fix,
    Label,
    Pattern,
)
from miner_guard.incidents.xid_patterns import expanded

_PATTERN_KEYS = frozenset(
    {
        "has",
        "servers",
        "alone",
        "not",
        "regex",
        "frames",
        "through",
        "role",
        "cause",
        "fix",
        "source",
        "restart",
        "least",
        "cancels",
        "roles",
        "notice",
        "instead",
    }
)
_ANSWER_KEYS = frozenset({"cause", "fix", "source"})


@dataclass(frozen=True)
class Index:
    """What the scanner needs until a line matches."""

    triggers: tuple[bytes, ...]
    events: frozenset[str]
    """The guard's events that show a label's cause."""


@dataclass(frozen=True)
class Document:
    """The combined content of all knowledge files."""

    labels: Mapping[str, Label]
    patterns: tuple[Pattern, ...]
    benign: tuple[Benign, ...]
    index: Index
    grammar: grammar.ErrorGrammar = grammar.EMPTY


def parsed(texts: Mapping[str, str]) -> Document:
    """Combine TOML documents, keyed by file name, into one. Raises BadKnowledge."""
    labels: dict[str, Label] = {}
    triggers: list[str] = []
    events: set[str] = set()
    patterns: list[Pattern] = []
    benign: list[Benign] = []
    general: tuple[str, dict[str, Any]] | None = None
    for file, text in texts.items():
        document = _document(file, text)
        if "general" in document:
            general = f"{file}: general", document.pop("general")
        triggers += document.pop("triggers", [])
        events |= set(document.pop("events", ()))
        lists, answers = document.pop("words", {}), _answers(file, document.pop("answers", {}))
        for entry in chain.from_iterable(map(expanded, document.pop("benign", []))):
            benign.append(_benign(f"{file}: benign", entry))
        for name, table in document.items():
            where = f"{file}: {name}"
            if name in labels:
                raise BadKnowledge(f"{file}: label {name} is defined twice")
            labels[name] = _label(where, name, table)
            for entry in chain.from_iterable(map(expanded, table["patterns"])):
                given = {"role": labels[name].role, **entry}
                answered = _with_answer(where, given, answers)
                patterns.append(_pattern(where, name, _with_words(where, answered, lists)))
    _check_references(labels, patterns, benign)
    named = set().union(*(label.events for label in labels.values()))
    if unlisted := named - events:
        raise BadKnowledge(f"event {sorted(unlisted)[0]} is missing from the list `events`")
    index = Index(_triggers(triggers), frozenset(events))
    rules = grammar.EMPTY if general is None else grammar.parsed(*general, labels)
    return Document(labels, tuple(patterns), tuple(benign), index, rules)


def index_of(text: str) -> Index:
    """Read the index from its TOML document. Raises BadKnowledge."""
    document = _document("the index", text)
    return Index(_triggers(document["triggers"]), frozenset(document["events"]))


def _document(file: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadKnowledge(f"{file}: not valid TOML: {error}") from error


def _benign(where: str, entry: Mapping[str, Any]) -> Benign:
    pattern = _pattern(where, "benign", {"role": "cause", **entry})
    return Benign(
        pattern,
        tuple(entry.get("cancels", ())),
        tuple(entry.get("roles", ())),
        entry.get("notice", ""),
    )


def _with_words(
    where: str, entry: Mapping[str, Any], lists: Mapping[str, Any]
) -> Mapping[str, Any]:
    """`entry`, with the list name in `servers` replaced by the list."""
    name = entry.get("servers")
    if not isinstance(name, str):
        return entry
    if name not in lists:
        raise BadKnowledge(f"{where}: servers is {name!r}; [words] has {sorted(lists)}")
    return {**entry, "servers": lists[name]}


def _answers(
    file: str, answers: Mapping[str, Mapping[str, str]]
) -> Mapping[str, Mapping[str, str]]:
    """The causes and fixes that patterns of the file share, by name."""
    for name, answer in answers.items():
        if unknown := answer.keys() - _ANSWER_KEYS:
            raise BadKnowledge(f"{file}: unknown key {sorted(unknown)[0]} in answer {name!r}")
    return answers


def _with_answer(
    where: str, entry: Mapping[str, Any], answers: Mapping[str, Mapping[str, str]]
) -> Mapping[str, Any]:
    """`entry`, with the cause and fix of the answer that it names. Its own keys take precedence."""
    name = entry.get("answer")
    if name is None:
        return entry
    if name not in answers:
        raise BadKnowledge(f"{where}: answer is {name!r}; [answers] has {sorted(answers)}")
    return {**answers[name], **{key: value for key, value in entry.items() if key != "answer"}}


def _label(where: str, name: str, table: Mapping[str, Any]) -> Label:
    known = {
        "severity",
        "restart",
        "applies",
        "role",
        "cause",
        "fixes",
        "follows",
        "events",
        "patterns",
    }
    known |= {"overcome_by_steps", "undone_by_losses", "moot_when_finished"}
    if unknown := set(table) - known:
        raise BadKnowledge(
            f"{where}: unknown key {sorted(unknown)[0]}; allowed: {', '.join(sorted(known))}"
        )
    for key, allowed in (("severity", SEVERITIES), ("restart", RESTARTS), ("applies", APPLIES)):
        if table.get(key) not in allowed:
            raise BadKnowledge(
                f"{where}: {key} is {table.get(key)!r}; allowed: {', '.join(allowed)}"
            )
    for key in ("cause", "fixes", "patterns"):
        if not table.get(key):
            raise BadKnowledge(f"{where}: {key} is missing")
    return Label(
        name=name,
        severity=table["severity"],
        restart=table["restart"],
        applies=table["applies"],
        cause=table["cause"],
        fixes=tuple(_fix(where, entry) for entry in table["fixes"]),
        follows=frozenset(table.get("follows", ())),
        events=frozenset(table.get("events", ())),
        overcome_by_steps=table.get("overcome_by_steps", False),
        undone_by_losses=table.get("undone_by_losses", False),
        moot_when_finished=table.get("moot_when_finished", False),
        role=table.get("role", "cause"),
    )


def _fix(where: str, entry: str | Mapping[str, str]) -> Fix:
    if isinstance(entry, str):
        return Fix(entry)
    if set(entry) != {"do", "source"}:
        raise BadKnowledge(f"{where}: a fix needs the keys do and source; it has {sorted(entry)}")
    return Fix(entry["do"], entry["source"])


def _pattern(where: str, label: str, entry: Mapping[str, Any]) -> Pattern:
    if unknown := set(entry) - _PATTERN_KEYS:
        raise BadKnowledge(f"{where}: unknown key {sorted(unknown)[0]} in a pattern")
    if entry["role"] not in ROLES:
        raise BadKnowledge(f"{where}: role is {entry['role']!r}; allowed: {', '.join(ROLES)}")
    restart = entry.get("restart", "")
    if restart and restart not in RESTARTS:
        raise BadKnowledge(f"{where}: restart is {restart!r}; allowed: {', '.join(RESTARTS)}")
    return Pattern(
        label=label,
        role=entry["role"],
        has=_words(where, entry, "has", required=True),
        excludes=_words(where, entry, "not"),
        servers=_words(where, entry, "servers"),
        expression=entry.get("regex"),
        frames=tuple(entry.get("frames", [""] if "through" in entry else ())),
        through=_words(where, entry, "through"),
        cause=entry.get("cause", ""),
        fix=entry.get("fix", ""),
        restart=restart,
        source=entry.get("source", ""),
        least=entry.get("least", 1),
        instead=frozenset(entry.get("instead", ())),
        alone=entry.get("alone", False),
    )


def _words(
    where: str, entry: Mapping[str, Any], key: str, *, required: bool = False
) -> tuple[str, ...]:
    words = tuple(entry.get(key, ()))
    if required and (not words or any(len(word) < 2 for word in words)):
        raise BadKnowledge(
            f"{where}: `{key}` must list words of two letters or more; it is {words}"
        )
    if loud := [word for word in words if word != word.lower()]:
        raise BadKnowledge(
            f"{where}: {loud[0]!r} contains capital letters; lines are compared in lower case"
        )
    return words


def check_expressions(patterns: Iterable[Pattern]) -> None:
    """Raise BadKnowledge if an expression is invalid, or if searching for it may take more than
    linear time."""
    for pattern in patterns:
        if pattern.expression is not None:
            _check_expression(pattern.label, pattern.expression)


def _check_expression(label: str, expression: str) -> None:
    try:
        re.compile(expression)
    except re.error as error:
        raise BadKnowledge(f"{label}: regex {expression!r}: {error}") from error
    if problem := regexes.superlinear(expression):
        raise BadKnowledge(f"{label}: regex {expression!r} contains {problem}")


def _check_references(
    labels: Mapping[str, Label], patterns: Iterable[Pattern], benign: Iterable[Benign]
) -> None:
    for pattern in patterns:
        if strangers := pattern.instead - labels.keys():
            raise BadKnowledge(
                f"{pattern.label}: `instead` names {sorted(strangers)[0]}, which is not a label"
            )
    for label in labels.values():
        if strangers := label.follows - labels.keys():
            raise BadKnowledge(
                f"{label.name}: follows {sorted(strangers)[0]}, which is not a label"
            )
    for entry in benign:
        if unknown := set(entry.cancels) - labels.keys():
            raise BadKnowledge(f"benign: cancels {sorted(unknown)[0]}, which is not a label")
        if entry.notice and entry.notice not in labels:
            raise BadKnowledge(f"benign: `notice` names {entry.notice}, which is not a label")
        if unknown := set(entry.roles) - set(ROLES):
            raise BadKnowledge(f"benign: `roles` names {sorted(unknown)[0]}, which is not a role")


def _triggers(words: Sequence[str]) -> tuple[bytes, ...]:
    if wrong := [word for word in words if word != word.lower() or re.search(r"[0-9.+-]|^$", word)]:
        raise BadKnowledge(f"trigger {wrong[0]!r}: use lower case, no digits, and none of . + -")
    known = frozenset(words)
    # A search for a word also finds every longer word that contains it.
    return tuple(word.encode() for word in words if known.isdisjoint(_shorter(word)))


def _shorter(word: str) -> Iterator[str]:
    """The proper substrings of a word. There are fewer of them than there are triggers."""
    for length in range(2, len(word)):
        for start in range(len(word) - length + 1):
            yield word[start : start + length]
